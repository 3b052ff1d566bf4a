"""The figures that pyplot knows: a run that draws one must not find those that an earlier run has drawn."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["figures"]


def figures() -> dict[Any, Any]:
    """By number, the very dict; one of nobody's where pyplot was not imported."""
    helpers: Any = sys.modules.get("matplotlib._pylab_helpers")
    return {} if helpers is None else helpers.Gcf.figs
