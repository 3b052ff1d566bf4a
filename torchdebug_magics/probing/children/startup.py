"""Gives an agent to every Python that another program starts, by a `sitecustomize` that stands first on ``PYTHONPATH``."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from torchdebug_magics.probing.children.agent import Agent

__all__ = ["begin", "environment_with_agents"]

_FOLDER, _ON_ERROR = "TORCHDEBUG_AGENTS", "TORCHDEBUG_ON_ERROR"
_NAME = "sitecustomize"
_TEXT = f"""import contextlib
with contextlib.suppress(Exception):
    from {__name__} import begin
    begin(__file__)
"""


def environment_with_agents(folder: str, on_error: str) -> Mapping[str, str]:
    """The variables for a command whose Python processes are to have agents; writes the `sitecustomize` into the folder."""
    Path(folder, f"{_NAME}.py").write_text(_TEXT, encoding="utf-8")
    package = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"), package)))
    return {**os.environ, "PYTHONPATH": path, _FOLDER: folder, _ON_ERROR: on_error}


def begin(file: str) -> None:
    """Start the agent of this process, then run the `sitecustomize` that it would have had; `file` is ours."""
    folder = os.environ.get(_FOLDER, "")
    if Path(folder).is_dir():
        agent = Agent(folder, os.environ.get(_ON_ERROR, ""))
        vars(sys)["_torchdebug_agent"] = agent  # held for the life of the process
        with contextlib.suppress(OSError):
            agent.begin()
    path = [place for place in sys.path if Path(place or ".").resolve() != Path(file).parent.resolve()]
    spec = importlib.machinery.PathFinder.find_spec(_NAME, path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
