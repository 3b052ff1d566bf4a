"""What is kept of each optimizer: its last steps, and how loss, norm and learning rate went over all of them."""

from __future__ import annotations

import csv
import importlib.util
import math
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdebug_magics.errors import TorchDebugError

if TYPE_CHECKING:
    from torchdebug_magics.probing.lines import Line


_RECENT = 256
ModuleStep = tuple[float, float, float]
"""(gradient norm, update ratio, share of zeros)"""
_COLUMNS = ("step", "module", "grad_norm", "update_ratio", "zero_share", "loss")


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of one optimizer."""

    step: int
    loss: float
    """NaN where it is not known, or is NaN."""
    norm: float
    rate: float
    batch: tuple[int, int] | None = None
    """(epoch, batch) of the DataLoader."""


@dataclass
class Clipping:
    """What `clip_grad_norm_` did over all steps."""

    line: Line | None = None
    steps_count: int = 0
    clipped_count: int = 0
    scaled_count: int = 0
    """Steps in which it clipped gradients that still had the GradScaler's factor."""
    max_norm: float = 0.0
    totals: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))


@dataclass(eq=False)
class StepHistory:
    """One optimizer."""

    name: str
    line: Line | None
    backward_line: Line | None = None
    has_closure: bool = False
    moments: deque[Moment] = field(default_factory=lambda: deque(maxlen=_RECENT))
    clipping: Clipping = field(default_factory=Clipping)
    steps_count: int = 0
    first_losses: list[float] = field(default_factory=list)
    """Of the first three steps."""
    most_loss: float = -math.inf
    largest_norm: float = 0.0
    """Of all steps but the last."""
    most_rate: float = 0.0
    idle_since: int | None = None
    """The step from which on the learning rate was 0, up to the last."""
    classes: int | None = None
    """How many classes the loss chooses from."""
    micro_batches: int = 1
    """Backward passes in the last step."""
    members: frozenset[int] = frozenset()
    """The positions of the parameters that had a gradient in the last step."""
    since: int = 0
    """Steps since other parameters got a gradient."""

    def add(self, moment: Moment) -> None:
        """One more step."""
        if self.moments:
            last = self.moments[-1]
            if math.isfinite(last.norm):
                self.largest_norm = max(self.largest_norm, last.norm)
            if math.isfinite(last.loss):
                self.most_loss = max(self.most_loss, last.loss)
        self.moments.append(moment)
        self.steps_count += 1
        self.since += 1
        self.most_rate = max(self.most_rate, moment.rate)
        self.idle_since = None if moment.rate != 0 else moment.step if self.idle_since is None else self.idle_since
        if len(self.first_losses) < 3 and math.isfinite(moment.loss):  # noqa: PLR2004 - see there
            self.first_losses.append(moment.loss)

    @property
    def is_warming_up(self) -> bool:
        """Whether the learning rate rises over the last steps."""
        return self.moments[-1].rate > 1.001 * self.moments[0].rate

    @property
    def is_winding_down(self) -> bool:
        """Whether a schedule has all but ended the training."""
        return self.moments[-1].rate < 0.05 * self.most_rate

    def losses(self) -> list[float]:
        """The finite ones of the last steps."""
        return [one.loss for one in self.moments if math.isfinite(one.loss)]


class StepLog:
    """Where steps are written to, if anywhere. A wrong place is an error before anything runs."""

    def __init__(self, csv_file: str | None, tensorboard: str | None) -> None:
        self._path = None if csv_file is None else Path(csv_file).expanduser()
        self._folder = tensorboard
        self._rows: Any = None
        self._scalars: Any = None
        if self._path is not None and (self._path.is_dir() or not self._path.parent.is_dir()):
            msg = f"--csv {csv_file}: not a file in a folder that exists"
            raise TorchDebugError(msg)
        if tensorboard is not None and importlib.util.find_spec("tensorboard") is None:
            msg = "--tensorboard needs TensorBoard, which is not installed: `%pip install tensorboard`, or use --csv FILE"
            raise TorchDebugError(msg)

    def attach(self, stack: ExitStack) -> None:
        """Open the file; it is closed with the stack."""
        if self._path is not None:
            try:
                file = stack.enter_context(self._path.open("w", newline="", encoding="utf-8"))
            except OSError as error:
                msg = f"--csv {self._path}: {error.strerror or error}"
                raise TorchDebugError(msg) from None
            self._rows = csv.writer(file)
            self._rows.writerow(_COLUMNS)
        if self._folder is not None:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - late, and only where it is installed

            self._scalars = SummaryWriter(self._folder)
            stack.callback(self._scalars.close)

    def write(self, step: int, modules: Mapping[str, ModuleStep], loss: float, *, optimizer: str) -> None:
        """One step of one optimizer."""
        if self._rows is not None:
            self._rows.writerows((step, name, *map(_short, numbers), _short(loss)) for name, numbers in modules.items())
        if self._scalars is not None:
            for name, numbers in modules.items():
                for what, value in zip(_COLUMNS[2:5], numbers, strict=True):
                    self._scalars.add_scalar(f"{what}/{name or 'model'}", value, step)
            self._scalars.add_scalar(f"loss/{optimizer}", loss, step)

    @property
    def is_open(self) -> bool:
        """Whether anything is to be written."""
        return self._rows is not None or self._scalars is not None


def _short(value: float) -> str:
    return f"{value:.6g}"
