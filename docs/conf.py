"""The site of npattn, for Sphinx: the README names the command."""

from __future__ import annotations

import importlib
import os
import pkgutil
import tempfile
from pathlib import Path
from typing import Any

import npattn

project = "npattn"
author = "npattn developers"
copyright = "npattn developers"  # noqa: A001 - Sphinx calls it so
version = release = npattn.__version__

extensions = [
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx-mathjax-offline",  # formulas are set without a network
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "npattn"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4

nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True
# Notebooks run with no settings of whoever builds, and without the kernel's remarks on its own network.
os.environ["IPYTHONDIR"] = tempfile.mkdtemp(prefix="npattn-docs-")
profile = Path(os.environ["IPYTHONDIR"], "profile_default")
profile.mkdir()
(profile / "ipython_kernel_config.py").write_text("c.IPKernelApp.log_level = 40\n", encoding="utf-8")

default_role = "py:obj"
autodoc_preserve_defaults = True  # xp=np, not the path of a module
autodoc_typehints = "none"  # the docstrings say it in shapes and dtypes
numpydoc_show_class_members = False
pygments_style, pygments_dark_style = "friendly", "monokai"


def public_modules() -> list[str]:
    """The package and its public modules, which readers import from."""
    children = (module.name for module in pkgutil.iter_modules(npattn.__path__))
    return ["npattn", *(f"npattn.{name}" for name in sorted(children) if not name.startswith("_"))]


def write_reference(folder: Path) -> None:
    """A page for each public module: its docstring, then all that it offers."""
    for old in folder.glob("npattn*.rst"):
        old.unlink()
    for name in public_modules():
        known = set(importlib.import_module(name).__all__) & set(npattn.__all__) if name != "npattn" else set()
        page = f"{name}\n{'=' * len(name)}\n\n.. automodule:: {name}\n   :members:\n"
        page += f"   :exclude-members: {', '.join(sorted(known))}\n" if known else ""
        (folder / f"{name}.rst").write_text(page, encoding="utf-8")


def skip_fields(_app: Any, _what: str, _name: str, thing: Any, skip: bool | None, _options: Any) -> bool | None:
    """The fields of a NamedTuple stand in its signature; Python's own words about them say no more."""
    return True if (getattr(thing, "__doc__", None) or "").startswith("Alias for field number") else skip


def link_outside_pages(_app: Any, docname: str, source: list[str]) -> None:
    """What stands at the top of the repository and in examples/ has its place in the site."""
    up = "../" * docname.count("/")
    for file, page in (("examples/README.md", "examples.md"), ("README.md", "index.md"), ("CHANGELOG.md", "changelog.md")):
        source[0] = source[0].replace(f"]({up}../{file}", f"]({up}{page}")


def setup(app: Any) -> None:
    """Sphinx calls this."""
    write_reference(Path(app.srcdir) / "reference")
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("source-read", link_outside_pages)
