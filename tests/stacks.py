"""The two kernel stacks that everything must work on; a missing one is a failure, never a skip."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

STACKS = ("modern", "colab")


def python(stack: str) -> str:
    """The interpreter of a stack."""
    if stack == "modern":
        return sys.executable
    named = os.environ.get("TORCHDEBUG_COLAB_PYTHON", "")
    if not Path(named).is_file():
        msg = f"the Colab-like stack is missing (TORCHDEBUG_COLAB_PYTHON={named!r}): run `make test`, which makes it"
        raise RuntimeError(msg)
    return named


def install_kernels(folder: Path) -> dict[str, str]:
    """Write a kernel spec for each stack under `folder`; gives the environment in which Jupyter finds them by the stack's name."""
    for stack in STACKS:
        spec = folder / "kernels" / stack
        spec.mkdir(parents=True)
        argv = [python(stack), "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": stack, "language": "python"}))
    return {"JUPYTER_PATH": str(folder)}
