"""Fixtures of the tests of threads and of BLAS."""

import pytest
from threadpoolctl import threadpool_limits

from tests.arrays.meeting import blas_threads


@pytest.fixture
def two_blas_threads():
    """BLAS on two threads, whatever the machine."""
    with threadpool_limits(2, user_api="blas"):
        if 2 not in blas_threads():
            pytest.skip("this NumPy has no BLAS whose threads can be set")
        yield
