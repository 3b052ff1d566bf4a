"""Sizes as formulas of the input's: a second run on fakes whose sizes are symbols.

A size that the model fixes (the features of a Linear) turns into its number by itself; what is left depends on the input alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from torchdebug_magics.instruments.shapes.follow.forward import forward
from torchdebug_magics.instruments.shapes.follow.seen import Seen
from torchdebug_magics.instruments.shapes.report import Row
from torchdebug_magics.probing.dry_runs.faking import Fakes
from torchdebug_magics.probing.dry_runs.inputs import named_tensors

# What the sizes of an input are usually called, by the number of its dimensions.
_LETTERS = {1: "N", 2: "BT", 3: "BTC", 4: "BCHW", 5: "BCDHW"}
_IN_BRACKETS = re.compile(r"\([^()]*\)")
_WIDTH = "D"
"""The last size that most outputs share."""
_SMALLEST_WIDTH = 8
_MOST_TIMES = 8


class Symbols(Fakes):
    """A fake world in which the sizes of the inputs are symbols, each with the real size as its hint."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: PLC0415 - half a second, and only for this

        self._env = ShapeEnv(duck_shape=False)
        super().__init__(self._env)
        self._inputs = {id(tensor): tensor for tensor in inputs}
        self._one_batch = bool(inputs) and all(tensor.dim() and tensor.shape[0] == 1 for tensor in inputs)
        self._names: dict[Any, str] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Symbolic for an input, else as in any fake world."""
        return self._symbolic(tensor) if id(tensor) in self._inputs else super().of(tensor)

    def zeros(self, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A described input."""
        return self._symbolic(torch.empty(sizes, dtype=dtype, device="cpu" if device.type == "meta" else device))

    def _symbolic(self, tensor: torch.Tensor) -> torch.Tensor:
        from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext  # noqa: PLC0415 - takes a second, and only --symbolic needs it

        if (self._one_batch or (tensor.dim() and tensor.shape[0] == 1)) and tensor.dim() > 1:
            # A size of 1 is never a symbol: it might be broadcast.
            tensor = torch.empty((2, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
        dims = tensor.dim()
        context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * dims, constraint_sizes=[None] * dims)
        fake = self.mode.from_tensor(tensor.detach(), symbolic_context=context)
        for letter, size in zip(_LETTERS.get(dims, "N" * dims), fake.shape, strict=False):
            if isinstance(size, torch.SymInt):
                self._names.setdefault(size.node.expr, self._free(letter))
        return fake

    def _free(self, letter: str) -> str:
        taken = set(self._names.values())
        return next(name for number in range(1, 100) if (name := letter if number == 1 else f"{letter}{number}") not in taken)

    def written(self, sizes: Sequence[Any], width: int | None) -> str:
        """``(B, T, 4*D)``."""
        return f"({', '.join(self._size(size, width) for size in sizes)}{',' if len(sizes) == 1 else ''})"

    def _size(self, size: Any, width: int | None) -> str:
        if isinstance(size, torch.SymInt):
            expression = self._env.simplify(size.node.expr)
            if not expression.free_symbols:
                return self._size(int(expression), width)
            named = {str(symbol): name for symbol, name in self._names.items()}
            written = re.sub(r"\bs\d+\b", lambda match: named.get(match[0], match[0]), str(expression))
            return written[1:-1] if _IN_BRACKETS.fullmatch(written) else written
        times, rest = divmod(size, width) if width else (0, 1)
        if rest or not 1 <= times <= _MOST_TIMES:
            return str(size)
        return _WIDTH if times == 1 else f"{times}*{_WIDTH}"


def with_formulas(seen: Seen, rows: tuple[Row, ...]) -> tuple[tuple[Row, ...], str, str]:
    """(the rows with their formulas, what the letters stand for that the model fixes, why there are none)."""
    given = [tensor for _, tensor in named_tensors((seen.inputs.args, dict(seen.inputs.kwargs)))]
    symbols = Symbols([*given, *(torch.empty(spec.sizes) for _, spec in seen.inputs.specs() if not given)])
    run = forward(seen.model, seen.inputs, symbols, trial=True, symbolic=True)
    calls = [(call.taken, call.symbols) for call in run.calls.made]
    if run.error is not None or len(calls) > len(rows):
        reason = next(iter(str(run.error or "its calls depend on the input's sizes").splitlines()), "")
        return rows, "", f"sizes could not be kept as symbols: {reason[:160]}"
    calls += [((), ())] * (len(rows) - len(calls))  # rows of modules that were not called
    width = _width([outputs for _, outputs in calls])

    def said(sizes: Sequence[Sequence[Any]]) -> str:
        return ", ".join(symbols.written(size, width) for size in sizes)

    written = [replace(row, input_formula=said(taken), formula=said(sizes)) for row, (taken, sizes) in zip(rows, calls, strict=True)]
    return tuple(written), f"{_WIDTH} = {width}" if any(_WIDTH in row.formula for row in written) else "", ""


def _width(outputs: Sequence[Sequence[Sequence[Any]]]) -> int | None:
    """The last size of most outputs of three dimensions, where the model fixes it: the width of a transformer."""
    last = Counter(sizes[-1] for call in outputs for sizes in call if len(sizes) == len(_LETTERS[3]) and isinstance(sizes[-1], int))
    widths = last.most_common(1)
    return widths[0][0] if widths and widths[0][0] >= _SMALLEST_WIDTH else None
