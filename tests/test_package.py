"""The package as a whole: what its import brings, which way its rooms import each other, and that public names are documented."""

from __future__ import annotations

import ast
import graphlib
import importlib
import inspect
import pkgutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import npattn

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "npattn"


# What an import brings -------------------------------------------------------------------------------------------------------

FRESH = """
import sys
import numpy as np
import numpy.random

before = set(sys.modules)
import npattn

print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
q = np.ones((2, 40, 8), np.float32)
out, saved = npattn.attention_forward(q, q, q, mask=npattn.causal_mask(), dropout=npattn.Dropout(0.1, 0))
npattn.attention_backward(out, saved)
params = npattn.MultiHeadParams.init(np.random.default_rng(0), width=8, heads=2)
out, saved = npattn.multi_head_attention_forward(params, q.astype("f8"), q.astype("f8"))
npattn.multi_head_attention_backward(out, saved)
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""


@pytest.fixture(scope="module")
def imported() -> list[set[str]]:
    """What a fresh interpreter has imported beside NumPy: after the import of npattn, and after forward and backward."""
    printed = subprocess.run([sys.executable, "-c", FRESH], check=True, stdout=subprocess.PIPE, text=True).stdout
    return [set(line.split()) for line in printed.splitlines()]


def test_attention_imports_no_optional_library(imported):
    for found in imported:
        assert found - sys.stdlib_module_names <= {"npattn", "threadpoolctl"}


def test_the_import_is_cheap(imported):
    assert not imported[0] & {"threadpoolctl", "dataclasses", "inspect", "ast", "asyncio", "argparse", "logging", "unittest"}


# Which way the rooms import --------------------------------------------------------------------------------------------------

# "" is npattn/__init__.py; the rest comes after
RANKS = {"_arrays": 0, "layers": 1, "_attention": 2, "models": 3, "_explore": 3, "": 4}
REST = 5
ALLOWED = {"numpy", "array_api_compat", "threadpoolctl"}
OPTIONAL = {"testing": {"cupy", "hypothesis"}, "plot": {"matplotlib"}, "_commands": {"hypothesis"}}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.glob("**/*.py"))}


def imports(name: str) -> Iterator[str]:
    """What a module imports, wherever in its text: submodules by their own name, other names by their module's."""
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else str(node.module)


def room(name: str) -> str:
    """``_attention`` for npattn._attention.masks, ``""`` for npattn itself."""
    return name.partition(".")[2].partition(".")[0]


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_one_way(name):
    rank = RANKS.get(room(name), REST)
    upwards = [other for other in imports(name) if other.split(".")[0] == "npattn" and RANKS.get(room(other), REST) > rank]
    assert not upwards


def test_nothing_imports_in_a_circle():
    own = {name: {other for other in imports(name) if other in MODULES} for name in MODULES}
    assert len(list(graphlib.TopologicalSorter(own).static_order())) == len(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_only_run_time_dependencies_are_imported(name):
    foreign = {other.partition(".")[0] for other in imports(name)} - sys.stdlib_module_names - {"npattn"}
    assert foreign <= ALLOWED | OPTIONAL.get(room(name), set())


def test_dependencies_are_the_three():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [d.partition(">=")[0].replace("-", "_") for d in project["dependencies"]] == [
        "numpy",
        "array_api_compat",
        "threadpoolctl",
    ]


# Public names ----------------------------------------------------------------------------------------------------------------

PUBLIC = ["npattn", *(f"npattn.{m.name}" for m in pkgutil.iter_modules(npattn.__path__) if not m.name.startswith("_"))]
NAMES = [f"{module}.{name}" for module in PUBLIC for name in getattr(importlib.import_module(module), "__all__", [])]


def find(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", PUBLIC)
def test_all_is_sorted_and_complete(name):
    module = importlib.import_module(name)
    assert module.__all__ == sorted(module.__all__, key=lambda n: (not n.isupper(), not n[0].isupper(), n))  # as ruff has it
    home = "npattn" if hasattr(module, "__path__") else name  # a package passes on what its modules define

    def is_own(thing: Any) -> bool:
        return not isinstance(thing, ModuleType) and getattr(thing, "__module__", "").startswith(home)

    assert set(module.__all__) >= {n for n, thing in vars(module).items() if not n.startswith("_") and is_own(thing)}
    assert module.__doc__


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith("_forward") and f"{n}_forward" not in NAMES])
def test_every_operation_is_three_functions(name):  # feed_forward is an operation, whose forward is feed_forward_forward
    op = name.removesuffix("_forward")
    assert {op, f"{op}_backward"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_public_names_have_docstrings(name):
    thing = find(name)
    if not callable(thing):
        return
    assert inspect.getdoc(thing)
    methods = (
        [m for n, m in vars(thing).items() if not n.startswith("_") and inspect.isfunction(m)] if inspect.isclass(thing) else []
    )
    for method in methods:
        assert inspect.getdoc(method), method


@pytest.mark.parametrize("name", NAMES)
def test_public_docstrings_are_whole(name):
    """numpydoc's form, with every parameter and result of a function described; the plain op may refer to its forward."""
    pytest.importorskip("numpydoc", reason="numpydoc is not installed")
    from numpydoc.hooks.validate_docstrings import parse_config
    from numpydoc.validate import validate

    thing = find(name)
    checks = parse_config(ROOT)["checks"] | {"GL08", "PR02", "PR03", "PR04"}
    if inspect.isfunction(thing) and not (f"{name}_forward" in NAMES and "_forward" in (thing.__doc__ or "")):
        checks |= {"PR01", "PR07", "RT01"}
    if callable(thing):
        assert [error for error in validate(name)["errors"] if error[0] in checks] == []
