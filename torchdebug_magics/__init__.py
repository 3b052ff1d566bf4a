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
    from torchdebug_magics.errors import DeterminismError, NonFiniteError, SessionError, TorchDebugError
    from torchdebug_magics.fixes import fixed_source
    from torchdebug_magics.instrument import Instrument
    from torchdebug_magics.instruments.deterministic.probe import verify
    from torchdebug_magics.instruments.overfit.subjects import subset
    from torchdebug_magics.instruments.shrink.examine import shrunk
    from torchdebug_magics.jupyter.extension import last_session, show
    from torchdebug_magics.run.meeting import gather

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
_HOMES = {
    "fixed_source": "fixes",
    "gather": "run.meeting",
    "last_session": "jupyter.extension",
    "load_ipython_extension": "jupyter.extension",
    "show": "jupyter.extension",
    "shrunk": "instruments.shrink.examine",
    "subset": "instruments.overfit.subjects",
    "unload_ipython_extension": "jupyter.extension",
    "verify": "instruments.deterministic.probe",
}
"""The modules of the functions, below this package."""


def __getattr__(name: str) -> Any:
    # Late, so that importing the package, and loading the extension, costs next to nothing.
    if name in __all__ or name in _HOMES:
        # Not `from torchdebug_magics import ...`, which would ask this very function for the name of the module.
        from torchdebug_magics.catalog import INSTRUMENTS, instrument  # noqa: PLC0415 - late: importing the package costs next to nothing

        if name in INSTRUMENTS:
            return instrument(name)
        return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
