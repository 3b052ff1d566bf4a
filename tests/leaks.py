"""What a test must leave as it found it: `snapshot` before and after, and `differences` in words.

Torch is looked at only where it has been imported, so that a test without it stays quick.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

from tests import processes

if TYPE_CHECKING:
    from collections.abc import Iterator

# Threads that a library starts once and keeps for the life of the process.
LASTING_THREADS = ("tqdm", "pytest_timeout", "IPythonHistorySavingThread", "asyncio_", "ThreadPoolExecutor", "InductorSubproc")

# Libraries that, once imported or used, keep a function of their own in place of one of Python's: nothing that we could undo.
OWN_WAYS = ("lightning.", "pytorch_lightning.", "lightning_fabric.", "torch.utils.data._utils.signal_handling")

MODULE_TABLES = (
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_buffer_registration_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
    "_global_forward_pre_hooks",
    "_global_module_registration_hooks",
    "_global_parameter_registration_hooks",
)
MODE_NOTES = ("_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode", "_is_in_any_mode_without_ignore_compile_internals")
"""With one of these left, nothing is compiled any more."""
SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGCHLD")
OPTIMIZER_TABLES = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def snapshot(*, rng: bool = False) -> dict[str, Any]:
    """Everything that is compared, by a name that a person understands."""
    state: dict[str, Any] = {
        "sys.gettrace()": sys.gettrace(),
        "sys.getprofile()": sys.getprofile(),
        "sys.excepthook": sys.excepthook,
        "threading's trace": getattr(threading, "_trace_hook", None),
        "threading's profile": getattr(threading, "_profile_hook", None),
        "warnings.formatwarning": warnings.formatwarning,
        "processes": processes.running_children(),
        "threads": {
            thread
            for thread in threading.enumerate()
            if not thread.name.startswith(LASTING_THREADS) and not isinstance(thread, threading._DummyThread)  # of autograd, for a GPU
        },
    }
    state.update({f"what {name} does": signal.getsignal(getattr(signal, name)) for name in SIGNALS if hasattr(signal, name)})
    state.update({f"the `write` of {name}": _other_write(stream) for name, stream in _streams() if hasattr(stream, "__dict__")})
    if threading.current_thread() is threading.main_thread():
        state["signal.set_wakeup_fd()"] = _wakeup_fd()
    if "multiprocessing.process" in sys.modules:
        state.update(_starts())
    if rng:
        state["random's state"] = random.getstate()
    if "torch" in sys.modules:
        state.update(_torch(rng=rng))
    return state


def warning_filters() -> dict[str, Any]:
    """Only good within one phase of a test. A library may add filters of its own while it is imported: nothing that we could undo."""
    return {f"warnings.filters, with {len(sys.modules)} modules imported": list(warnings.filters)}


def _streams() -> Iterator[tuple[str, Any]]:
    for name in ("sys.stdout", "sys.stderr"):
        stream = getattr(sys, name.partition(".")[2])
        yield f"{name} ({id(stream):x})", stream  # another one, as when output is captured, is not compared


def _other_write(stream: Any) -> Any:
    """What stands before a stream's own `write`; that itself may have been put back where none was."""
    found = vars(stream).get("write")
    return None if getattr(found, "__self__", None) is stream else found


def _wakeup_fd() -> int:
    """Read by taking it away for a moment: there is no other way."""
    number = signal.set_wakeup_fd(-1)
    if number >= 0:
        signal.set_wakeup_fd(number, warn_on_full_buffer=False)
    return number


def _starts() -> dict[str, Any]:
    from multiprocessing import util
    from multiprocessing.process import BaseProcess

    begins = [type(one) for one in vars(util)["_afterfork_registry"].values()]
    return {
        "BaseProcess.start": BaseProcess.start,
        "agents that a fork would wake": [kind for kind in begins if kind.__module__.endswith(".ranks.agent")],
    }


def _torch(*, rng: bool) -> dict[str, Any]:
    import torch
    from torch.nn.modules import module
    from torch.optim import optimizer
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils import _python_dispatch

    state: dict[str, Any] = {
        **{f"torch.nn.modules.module.{name}": dict(getattr(module, name)) for name in MODULE_TABLES},
        **{f"torch.optim.optimizer.{name}": dict(getattr(optimizer, name)) for name in OPTIMIZER_TABLES},
        "torch.nn.Module.__call__": torch.nn.Module.__call__,
        "torch.nn.Module._call_impl": torch.nn.Module._call_impl,
        "torch.autograd.backward": torch.autograd.backward,
        "torch.autograd.grad": torch.autograd.grad,
        "whose torch.compile is": getattr(torch.compile, "_torchdebug_owner", None),  # Lightning puts its own there when it is imported
        "the next batch of a DataLoader": torch.utils.data.dataloader._BaseDataLoaderIter.__next__,
        "torch.Tensor.backward": torch.Tensor.backward,
        "the dispatch modes": list(_python_dispatch._get_current_dispatch_mode_stack()),
        "what torch notes of its dispatch modes": [getattr(_python_dispatch, name) for name in MODE_NOTES],
        "the function modes": list(_get_current_function_mode_stack()),
        "the saved-tensors hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "anomaly mode": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "deterministic algorithms": (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        "deterministic fill": torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn's flags": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.cuda.is_initialized()": torch.cuda.is_initialized(),
    }
    if "torch._dynamo.eval_frame" in sys.modules:
        state["what turns torch's compiler on"] = sys.modules["torch._dynamo.eval_frame"]._maybe_set_eval_frame
    if rng:
        state["torch's RNG state"] = torch.get_rng_state().tolist()
        if "numpy" in sys.modules:
            import numpy as np

            state["numpy's RNG state"] = str(np.random.get_state(legacy=False))  # noqa: NPY002 - the global one is the one that users seed
    return state


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line for everything that is in both and is not what it was."""
    changed = [
        f"{name}: {_short(value)} became {_short(after[name])}"
        for name, value in before.items()
        if name in after and name not in {"threads", "processes"} and not _same(value, after[name])
    ]
    left = {thread for thread in after.get("threads", set()) - before.get("threads", set()) if _still_runs(thread)}
    changed += [f"a thread still runs: {thread.name}" for thread in sorted(left, key=lambda thread: thread.name)]
    started = after.get("processes", set()) - before.get("processes", set())
    return changed + [f"a process still runs: {name}" for name in processes.kill_left(started)]


def _same(before: Any, after: Any) -> bool:
    return before is after or bool(before == after) or (getattr(after, "__module__", None) or "").startswith(OWN_WAYS)


def _still_runs(thread: threading.Thread, *, grace_s: float = 2.0) -> bool:
    """Whether it goes on; one that is about to end is given the time to do so."""
    end = time.monotonic() + grace_s
    while thread.is_alive() and time.monotonic() < end:
        time.sleep(0.01)
    return thread.is_alive()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
