"""Settings of the process and of torch that code may change for all that follows: read, kept and put back."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from torchdebug_magics.probing.safety import Guard


class Setting(NamedTuple):
    """How one setting is read and written."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    line: str = ""
    """What the user writes to set it, with `{!r}` for the value; empty where no number depends on it."""


def _device() -> Any:
    """None where nobody has set it: to set it, even to the same one, puts a mode under all that follows."""
    context: Any = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)
    mode = getattr(context, "device_context", None)
    return None if mode is None else mode.device


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(modes: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(modes[0], warn_only=modes[1])


def _set_streams(streams: tuple[Any, Any]) -> None:
    sys.stdout, sys.stderr = streams


def _filters() -> tuple[int, Any, list[Any]]:
    """With the list itself, which `warnings.catch_warnings` replaces."""
    return id(warnings.filters), warnings.filters, list(warnings.filters)


def _set_filters(kept: tuple[int, Any, list[Any]]) -> None:
    warnings.filters = kept[1]
    kept[1][:] = kept[2]
    warnings.resetwarnings.__globals__.get("_filters_mutated", lambda: None)()


def _set_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before:
        del os.environ[name]
    os.environ |= {name: value for name, value in before.items() if os.environ.get(name) != value}


def _log_handlers() -> dict[str, list[logging.Handler]]:
    """Handlers by the names of all loggers; those that a rerun adds would write each line once more."""
    loggers = {"": logging.root, **logging.root.manager.loggerDict}
    return {name: list(logger.handlers) for name, logger in loggers.items() if isinstance(logger, logging.Logger)}


def _set_log_handlers(before: dict[str, list[logging.Handler]]) -> None:
    for name, handlers in _log_handlers().items():
        if handlers != before.get(name, []):
            logging.getLogger(name or None).handlers[:] = before.get(name, [])


def _items(values: list[Any]) -> Setting:
    return Setting(lambda: list(values), lambda items: values.__setitem__(slice(None), items))


def _figures() -> dict[Any, Any]:
    """Of pyplot, by their numbers."""
    helpers: Any = sys.modules.get("matplotlib._pylab_helpers")
    return {} if helpers is None else dict(helpers.Gcf.figs)


def _set_figures(before: dict[Any, Any]) -> None:
    helpers: Any = sys.modules["matplotlib._pylab_helpers"]
    helpers.Gcf.figs.clear()
    helpers.Gcf.figs.update(before)


SETTINGS: Mapping[str, Setting] = {
    "the standard streams": Setting(lambda: (sys.stdout, sys.stderr), _set_streams),
    "the working folder": Setting(os.getcwd, os.chdir, "os.chdir({!r})"),
    "the environment": Setting(lambda: dict(os.environ), _set_environment),
    "the level of logging": Setting(lambda: logging.root.manager.disable, logging.disable),
    "the handlers of loggers": Setting(_log_handlers, _set_log_handlers),
    "the filters of warnings": Setting(_filters, _set_filters),
    "the default dtype": Setting(torch.get_default_dtype, torch.set_default_dtype, "torch.set_default_dtype({!r})"),
    "the default device": Setting(_device, torch.set_default_device, "torch.set_default_device({!r})"),
    "the grad mode": Setting(torch.is_grad_enabled, torch.set_grad_enabled, "torch.set_grad_enabled({!r})"),
    "anomaly detection": Setting(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "deterministic algorithms": Setting(_deterministic, _set_deterministic),
    "repeated warnings": Setting(torch.is_warn_always_enabled, torch.set_warn_always),
    "the fast path of attention": Setting(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    "the number of threads": Setting(torch.get_num_threads, torch.set_num_threads, "torch.set_num_threads({!r})"),
    "the recursion limit": Setting(sys.getrecursionlimit, sys.setrecursionlimit),
    "the path of imports": _items(sys.path),
    "the arguments": _items(sys.argv),
    "the callbacks of gc": _items(gc.callbacks),
    "the collection of cycles": Setting(gc.isenabled, lambda is_on: gc.enable() if is_on else gc.disable()),
    "NumPy's handling of errors": Setting(np.geterr, lambda before: np.seterr(**before)),
    "pyplot's figures": Setting(_figures, _set_figures),
}


class ProcessSettings:
    """All settings at one moment."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        for name, setting in SETTINGS.items():
            with contextlib.suppress(Exception):  # such as a working folder that was removed: there is nothing to come back to
                self._values[name] = setting.read()

    def put_back(self, guard: Guard) -> None:
        """Write those that have changed since."""
        for name, value in self._values.items():
            guard.run(f"putting back {name}", _write, SETTINGS[name], value)


def _write(setting: Setting, value: Any) -> None:
    is_same = False
    with contextlib.suppress(OSError):  # a working folder that is gone cannot be read, and is left all the same
        is_same = setting.read() == value
    if not is_same:
        setting.write(value)
