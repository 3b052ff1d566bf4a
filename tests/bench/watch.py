"""Time `%%torchdebug` beside the instruments that it runs; ``python -m tests.bench.watch [gpt2|cnn|mlp] [--quick]``.

It prints, and never fails on a figure. The ratios that count are those of CPU time: the process has one thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in {None, ""}:  # `python tests/bench/watch.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torchdebug_magics
from tests.bench.gradwatch import compare
from tests.bench.rivals import Contender, nothing, off

ASKED = {"gpt2": {"torchdebug": 1.10}, "cnn": {"torchdebug": 1.10}, "mlp": {"torchdebug": 1.40}}


def _session(begin: Callable[[], Any], _training: object) -> Any:
    return begin()


CONTENDERS = (
    Contender("plain", nothing, off),
    Contender("torchdebug", nothing, partial(_session, torchdebug_magics.watch)),
    Contender("gradwatch", nothing, partial(_session, torchdebug_magics.gradwatch)),
    Contender("nanhunt", nothing, partial(_session, torchdebug_magics.nanhunt)),
    Contender("memtrace --light", nothing, partial(_session, partial(torchdebug_magics.memtrace, light=True))),
    Contender("autograd", nothing, partial(_session, torchdebug_magics.autograd)),
    Contender("hangwatch", nothing, partial(_session, torchdebug_magics.hangwatch)),
)


if __name__ == "__main__":
    compare(CONTENDERS, ASKED, sys.argv[1:])
