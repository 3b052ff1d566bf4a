"""What every notebook of the corpus needs, imported once in the process that the others are forked from."""

from __future__ import annotations

import numpy as np
import torch
from IPython.core.interactiveshell import InteractiveShell

import torchdebug_magics
from tests import doors

__all__ = ["InteractiveShell", "doors", "np", "torch", "torchdebug_magics"]
