"""Reads from the frames of a thread what it waits for: the outermost call of the standard library or of PyTorch that is known to wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from torchdebug_magics.probing.source.call_sites import names_of
from torchdebug_magics.probing.source.code_owner import owner
from torchdebug_magics.probing.waits.builtin_waits import builtin_wait
from torchdebug_magics.probing.waits.readers import POLLS, READERS
from torchdebug_magics.probing.waits.waiting import Waiting

__all__ = ["own_frames", "wait_of"]

_DEBUGGERS = frozenset({"pdb", "bdb", "ipdb", "cmd", "IPython.core.debugger", "IPython.terminal.debugger", "pudb.debugger"})
_PROMPTS = frozenset({"interaction", "cmdloop", "_cmdloop", "_do_wait_suspend", "do_wait_suspend"})
_INPUTS = frozenset({"_input_request", "raw_input", "getpass"})
_NETWORK = ("urllib3", "http.client", "urllib.request", "requests", "httpx", "httpcore", "aiohttp", "ssl", "socket", "ftplib", "smtplib")
_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.utils.cpp_extension", "triton")
_LAUNCHERS = ("torch.distributed.launcher", "torch.distributed.elastic", "torch.distributed.run", "torch.distributed.checkpoint")
_COLLECTIVES = ("torch.distributed", "torch.nn.parallel.distributed")
_IDLE = {
    ("multiprocessing.pool", "worker"), ("multiprocessing.pool", "_handle_workers"), ("multiprocessing.pool", "_handle_tasks"),
    ("multiprocessing.pool", "_handle_results"), ("concurrent.futures.thread", "_worker"), ("tqdm._monitor", "run"),
    ("concurrent.futures.process", "_process_worker"), ("torch.utils.data._utils.worker", "_worker_loop"),
}  # fmt: skip
"""Loops that wait for work whenever there is none."""
_BEGINNINGS = {("multiprocessing.process", "_bootstrap"), ("multiprocessing.spawn", "_main")}
"""The first call of a process that `multiprocessing` has started: what stands above belongs to its parent, or to the interpreter."""
_PACKAGE = __name__.partition(".")[0]


def own_frames(frame: FrameType | None) -> list[FrameType]:
    """The frames of a thread, innermost first: those of its own process, without what a loop that polls calls meanwhile."""
    found: list[FrameType] = []
    while frame is not None:
        place = (_module(frame), frame.f_code.co_name)
        if place in POLLS and READERS[place](names_of(frame)) is not None:
            found.clear()
        found.append(frame)
        if place in _BEGINNINGS:
            break
        frame = frame.f_back
    return found


def wait_of(frames: Sequence[FrameType]) -> Waiting | None:
    """None for a thread that computes, as far as its frames tell; `frames` are innermost first."""
    if not frames:
        return None
    inner = frames[: _first_user(frames)]
    for frame in reversed(inner):
        waiting = _known(frame, inner)
        if waiting is not None:
            return waiting
    return builtin_wait(frames[0])


def _first_user(frames: Sequence[FrameType]) -> int:
    return next((at for at, frame in enumerate(frames) if owner(frame.f_code.co_filename) == "user"), len(frames))


def _known(frame: FrameType, inner: Sequence[FrameType]) -> Waiting | None:  # noqa: PLR0911 - a table by module
    module, name = _module(frame), frame.f_code.co_name
    if (loop := _loop(frame, inner)) is not None:
        return loop
    if module in _DEBUGGERS and name in _PROMPTS:
        return Waiting("input", "a debugger's prompt", facts={"debugger": True})
    if name in _INPUTS and module.startswith(("ipykernel", "getpass", "google.colab")):
        is_debugger = any(_module(one) in _DEBUGGERS for one in inner)
        return Waiting("input", "a debugger's prompt" if is_debugger else "your input", facts={"debugger": is_debugger})
    reader = READERS.get((module, name))
    if reader is not None:
        waiting = reader(names_of(frame))
        if waiting is not None:
            return waiting
    if _is_in(module, _COLLECTIVES) and not _is_in(module, _LAUNCHERS) and not name.startswith(("_", "wrapper", "forward")):
        return _collective(name, names_of(frame))
    if _is_in(module, _COMPILERS):
        return Waiting("python", "torch.compile", facts={"compiling": True})
    if _is_in(module, _NETWORK):
        host = _host(inner)
        return Waiting("io", f"a response from {host}" if host else "the network", facts={"network": True, "host": host})
    return None


def _loop(frame: FrameType, inner: Sequence[FrameType]) -> Waiting | None:
    """What a loop of a library's waits for, or an import, which runs a module."""
    module, name = _module(frame), frame.f_code.co_name
    if (module, name) in _IDLE and _has_no_work(frame, inner):
        return Waiting("queue", "more work", facts={"idle": True})
    if (module, name) == ("asyncio.base_events", "_run_once"):
        return Waiting("io", "an event of its loop", facts={"may_end": True})
    if name == "_find_and_load" and module.endswith(("importlib._bootstrap", "_frozen_importlib")) and not _waits_to_import(inner):
        imported = str(names_of(frame).get("name"))
        if imported.partition(".")[0] == _PACKAGE:  # so that a child can be watched: nothing that its own code asks for
            return Waiting("python", "its start", facts={"does": "is starting"})
        return Waiting("python", f"the import of {imported}", facts={"does": f"imports {imported}"})
    return None


def _waits_to_import(inner: Sequence[FrameType]) -> bool:
    return any((_module(frame), frame.f_code.co_name) in READERS for frame in inner if owner(frame.f_code.co_filename) == "python")


def _has_no_work(frame: FrameType, inner: Sequence[FrameType]) -> bool:
    """Whether a loop of a pool waits in its queue: the frame that it has called, if any, is the queue's."""
    at = inner.index(frame)
    called = _module(inner[at - 1]) if at else "queue"
    return called.startswith(("queue", "multiprocessing.queues", "multiprocessing.connection", "multiprocessing.synchronize", "threading"))


def _collective(name: str, held: Mapping[str, Any]) -> Waiting:
    numbers = {key: held[key] for key in ("rank", "world_size", "src", "dst") if isinstance(held.get(key), int) and held[key] >= 0}
    what = f"init_process_group of {numbers['world_size']} ranks" if name == "init_process_group" and "world_size" in numbers else name
    peer = numbers.get("src", numbers.get("dst")) if name in {"send", "recv"} else None
    return Waiting("collective", what if peer is None else f"{name} with rank {peer}", facts={"op": name, "peer": peer, **numbers})


def _host(inner: Sequence[FrameType]) -> str:
    for frame in inner:
        held = names_of(frame)
        for value in (held.get("self"), held.get("conn"), held.get("address")):
            host = getattr(value, "host", None) if not isinstance(value, tuple) else value[0]
            if isinstance(host, str) and host:
                return host
    return ""


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return module.startswith(packages) and any(module == one or module.startswith(f"{one}.") for one in packages)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
