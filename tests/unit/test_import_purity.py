"""Importing the package and loading the extension costs next to nothing; a fresh interpreter says so."""

from __future__ import annotations

import textwrap

import pytest

from tests import children

HEAVY = {"torch", "ipywidgets", "matplotlib", "pynvml", "numpy", "psutil"}

SHELL = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.history_manager.enabled = False
"""


def newly_imported(code: str, *, before: str = "") -> set[str]:
    """The top-level modules that `code` brings into a fresh interpreter, after `before` has run."""
    script = f"import sys\n{before}\nknown = set(sys.modules)\n{textwrap.dedent(code)}\nprint(*(set(sys.modules) - known))"
    return {name.partition(".")[0] for name in children.python("-c", script).split()}


@pytest.mark.parametrize(
    "code",
    [
        "import torchdebug_magics",
        "import torchdebug_magics; dir(torchdebug_magics)",
        "from torchdebug_magics import catalog; list(catalog.instruments())",
        "import torchdebug_magics; torchdebug_magics.nanhunt",
        "import torchdebug_magics.report, torchdebug_magics.format, torchdebug_magics.session, torchdebug_magics.errors",
    ],
)
def test_importing_brings_nothing_heavy(code: str) -> None:
    assert not newly_imported(code) & (HEAVY | {"IPython", "traitlets"})


def test_loading_the_extension_brings_nothing_heavy() -> None:
    assert not newly_imported('shell.run_line_magic("load_ext", "torchdebug_magics")', before=SHELL) & HEAVY


@pytest.mark.parametrize("module", sorted(HEAVY))
def test_this_test_would_see_a_heavy_import(module: str) -> None:
    assert module in newly_imported(f"import {module}")
