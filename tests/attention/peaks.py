"""How much memory a call takes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

from npattn._attention.memory import drop_spare_memory


def peak(work: Callable[[], Any], *, fresh: bool = True) -> tuple[int, Any]:
    """The most bytes that are new at a time during ``work()``, and what it returns.

    ``fresh``: it finds no memory of earlier calls.
    """
    if fresh:
        drop_spare_memory()
    tracemalloc.start()
    try:
        results = work()
        return tracemalloc.get_traced_memory()[1], results
    finally:
        tracemalloc.stop()
