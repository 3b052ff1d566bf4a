"""Every step in full, written as it is measured: a CSV file, or TensorBoard scalars."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdebug_magics.errors import TorchDebugError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import ExitStack

__all__ = ["ModuleStep", "StepLog"]

ModuleStep = tuple[float, float, float]
"""(gradient norm, update ratio, share of zeros)"""
_COLUMNS = ("step", "module", "grad_norm", "update_ratio", "zero_share", "loss")


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
