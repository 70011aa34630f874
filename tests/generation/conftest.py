"""JAX compiles every operation anew for every length of a cache: its tests are slow ones."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before the command line says which are left out."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if HERE in item.path.parents and callspec is not None and callspec.params.get("library") == "jax":
            item.add_marker(pytest.mark.slow)
