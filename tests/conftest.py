"""What all tests share: the array libraries as fixtures, Hypothesis profiles, and skips that may be forbidden.

``library`` runs a test once for each array library; ``xp``, ``to_xp`` belong to the same one. They are session-scoped, since a
function-scoped fixture fails Hypothesis's health check.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from npattn.testing import libraries
from npattn.testing.libraries import Library, Unavailable, open_library

collect_ignore = ["data"]  # scripts there make the files; they want packages that the tests do without

os.environ.setdefault("JAX_PLATFORMS", "cpu")

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("random", derandomize=False, deadline=None, print_blob=True)
hypothesis.settings.register_profile("nightly", derandomize=False, deadline=None, print_blob=True, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session", params=libraries.NAMES)
def library(request: pytest.FixtureRequest) -> Library:
    """Every array library in turn; a test skips, with the reason, where one is missing."""
    try:
        return open_library(request.param)
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def xp(library: Library) -> Any:
    """The namespace of `library`."""
    return library.xp


@pytest.fixture(scope="session")
def to_xp(library: Library) -> Callable[..., Any]:
    """``to_xp(values, dtype=None)``: an array of `library`, on its device."""
    return lambda values, dtype=None: libraries.asarray(values, library, dtype=dtype)


@pytest.fixture(autouse=True)
def _library_settings(request: pytest.FixtureRequest) -> Iterator[None]:
    """A library's settings hold for the process: they are on while a test of that library runs, and for no other."""
    if "library" not in request.fixturenames:
        yield
        return
    with request.getfixturevalue("library").active():
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--allow-skips", metavar="REGEX", help="fail every test that skips for a reason in which REGEX is not found")
    parser.addoption("--note-passed", metavar="FILE", help="write the ids of the tests that passed into FILE")
    parser.addoption("--leave-out", metavar="FILE", help="run no test whose id is in FILE")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell script; there are tests of interrupts
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if (path := config.getoption("--note-passed")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_NotePassed(Path(path)))


class _NotePassed:
    """Writes the ids of the tests that passed, with pytest-xdist in the process that they are told to."""

    def __init__(self, path: Path) -> None:
        self.path, self.passed = path, list[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    def pytest_unconfigure(self) -> None:
        self.path.write_text("".join(f"{name}\n" for name in self.passed), encoding="utf-8")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if path := config.getoption("--leave-out"):
        known = set(Path(path).read_text(encoding="utf-8").splitlines())
        left_out = [item for item in items if item.nodeid in known]
        items[:] = [item for item in items if item.nodeid not in known]
        config.hook.pytest_deselected(items=left_out)


def _forbid_skip(config: pytest.Config, report: Any) -> Any:
    allowed = config.getoption("--allow-skips")
    if allowed is not None and report.skipped and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
        if not re.search(allowed, reason):
            report.outcome, report.longrepr = "failed", f"only skips for {allowed!r} are allowed here: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """With --allow-skips, no test is left out in silence."""
    return _forbid_skip(item.config, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Nor is a whole file."""
    return _forbid_skip(collector.config, (yield))
