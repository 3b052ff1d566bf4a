"""Debug PyTorch where you work: ``%load_ext torchdebug_magics``, then ``%%nanhunt`` above a cell.

Every magic is also a context manager or function of the same name here, with the same options::

    with torchdebug_magics.nanhunt() as session:
        train()
    session.report
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from torchdebug_magics.errors import NonFiniteError, SessionError, TorchDebugError
    from torchdebug_magics.instrument import Instrument

    nanhunt: Instrument

__version__ = "0.1.0"
__all__ = ["NonFiniteError", "SessionError", "TorchDebugError", "__version__", "nanhunt"]  # noqa: PLE0604 - lazy


def __getattr__(name: str) -> Any:
    # Late, so that importing the package, and loading the extension, costs next to nothing.
    from torchdebug_magics import catalog, errors  # noqa: PLC0415

    if name in catalog.INSTRUMENTS:
        return catalog.instrument(name)
    if name in errors.__all__:
        return getattr(errors, name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics: ``%load_ext torchdebug_magics``."""
    from torchdebug_magics.jupyter import extension  # noqa: PLC0415

    extension.load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Leave nothing behind: ``%unload_ext torchdebug_magics``."""
    from torchdebug_magics.jupyter import extension  # noqa: PLC0415

    extension.unload(shell)
