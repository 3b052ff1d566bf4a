"""Debug PyTorch where you work: ``%load_ext torchdebug_magics``, then ``%%nanhunt`` above a cell.

Every magic is also a context manager or function of the same name here, with the same options::

    with torchdebug_magics.nanhunt() as session:
        train()
    session.report
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from IPython.core.interactiveshell import InteractiveShell
    from torch import nn
    from torch.utils.data import DataLoader

    from torchdebug_magics.errors import DeterminismError, NonFiniteError, SessionError, TorchDebugError
    from torchdebug_magics.instrument import Instrument
    from torchdebug_magics.ranks.report import RanksReport
    from torchdebug_magics.report import Report
    from torchdebug_magics.session import Session

    autograd: Instrument
    deterministic: Instrument
    gradwatch: Instrument
    hangwatch: Instrument
    memclean: Instrument
    memgauge: Instrument
    memmark: Instrument
    memtrace: Instrument
    nanhunt: Instrument
    overfit: Instrument
    shapes: Instrument
    shrink: Instrument
    stepzero: Instrument
    watch: Instrument

__version__ = "0.1.0"
__all__ = [
    "DeterminismError", "NonFiniteError", "SessionError", "TorchDebugError", "__version__", "autograd", "deterministic", "fixed_source",
    "gather", "gradwatch", "hangwatch", "last_session", "memclean", "memgauge", "memmark", "memtrace", "nanhunt", "overfit", "shapes",
    "show", "shrink", "shrunk", "stepzero", "subset", "verify", "watch",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # Late, so that importing the package, and loading the extension, costs next to nothing.
    if name in __all__:
        # Not `from torchdebug_magics import ...`, which would ask this very function for the name of the module.
        from torchdebug_magics.catalog import INSTRUMENTS, instrument  # noqa: PLC0415 - late: importing the package costs next to nothing

        if name in INSTRUMENTS:
            return instrument(name)
        return getattr(importlib.import_module("torchdebug_magics.errors"), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def last_session() -> Session[Any] | None:
    """The session of the latest cell under a magic, or None: ``last_session().bad`` holds the tensors at its finding.

    Only the latest is kept, until the next one ends; it pins those tensors.
    """
    from torchdebug_magics.jupyter import extension  # noqa: PLC0415 - late: importing the package costs next to nothing

    return extension.last_session()


def show(report: Report, *, widget: bool = False) -> None:
    """Show a report again; with `widget`, as an interactive view: filter, sort, expand."""
    from torchdebug_magics.jupyter import extension  # noqa: PLC0415 - late: importing the package costs next to nothing

    extension.show(report, widget=widget)


def gather(report: Report) -> RanksReport | None:
    """Merge the reports of all ranks of the default process group: returns the merged report on rank 0, None on all others.

    A collective: every rank must call it, with its own report of the same instrument; if a rank does not, the others wait until the
    group's timeout. Raises `TorchDebugError` if no process group is initialized.
    """
    gathered: RanksReport | None = importlib.import_module("torchdebug_magics.ranks.gathering").gather(report)
    return gathered


def fixed_source(report: Report) -> dict[int | str, str]:
    """The whole new source of each cell, by its number, and of each file, by its path, with the edits of a report applied.

    Nothing is written. Raises `TorchDebugError` where the report has no edits: its fix is then advice in words.
    """
    fixed: dict[int | str, str] = importlib.import_module("torchdebug_magics.fixes").fixed_source(report)
    return fixed


def verify(function: Callable[[], object], **options: Any) -> Report:
    """Call a function twice from the same start, and name the first op that differs: ``%%deterministic --verify`` for scripts and tests.

    `options`: ``seed``, ``strict``, ``keep_rng``, ``anyway``. Exceptions propagate; the state afterwards is that after one call.
    """
    verified: Report = importlib.import_module("torchdebug_magics.instruments.deterministic.probe").verify(function, **options)
    return verified


def shrunk(model: nn.Module, *args: Any, layers: int = 2, skip_attention: bool = False, **inputs: Any) -> AbstractContextManager[Report]:
    """Reduce each stack of a model to `layers` layers inside a ``with``; all are restored afterwards, also after an error.

    `args` and `inputs` are passed to the forward that proves the result. Raises `TorchDebugError` if the model cannot be shrunk.
    """
    module = importlib.import_module("torchdebug_magics.instruments.shrink.examine")
    small: AbstractContextManager[Report] = module.shrunk(model, *args, layers=layers, skip_attention=skip_attention, **inputs)
    return small


def subset(loader: DataLoader[Any], samples: int = 100) -> DataLoader[Any]:
    """A loader of a few samples of the same data set, spread evenly over the classes: a training must succeed on these first.

    Batch size, collation, transforms and shuffling are those of `loader`. Raises `TorchDebugError` if the data set has no length.
    """
    small: DataLoader[Any] = importlib.import_module("torchdebug_magics.instruments.overfit.subjects").subset(loader, samples)
    return small


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics: ``%load_ext torchdebug_magics``."""
    from torchdebug_magics.jupyter import extension  # noqa: PLC0415 - late: importing the package costs next to nothing

    extension.load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove the magics: ``%unload_ext torchdebug_magics``."""
    from torchdebug_magics.jupyter import extension  # noqa: PLC0415 - late: importing the package costs next to nothing

    extension.unload(shell)
