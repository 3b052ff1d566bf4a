"""The IPython that runs here, found without importing it."""

from __future__ import annotations

import builtins
import sys
from typing import Any

__all__ = ["our_extension", "running_shell"]

_KEY = "TorchDebug"
"""Under which `%load_ext` keeps what is ours, beside IPython's own magics."""


def running_shell() -> Any | None:
    """The shell, which puts `get_ipython` among the builtins of its cells; None where there is none."""
    asked = getattr(builtins, "get_ipython", None)
    if asked is None and "IPython" in sys.modules:
        asked = getattr(sys.modules["IPython"], "get_ipython", None)
    return asked() if asked is not None else None


def our_extension(shell: Any | None) -> Any | None:
    """What `%load_ext torchdebug_magics` put into a shell, which pins what its last session kept; None where it is not loaded."""
    return getattr(getattr(shell, "magics_manager", None), "registry", {}).get(_KEY)
