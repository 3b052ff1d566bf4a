"""A real kernel, driven as a front end drives it."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

from tests import processes, stacks

if TYPE_CHECKING:
    from typing import Self

    from _pytest.mark import ParameterSet

Message = dict[str, Any]
START_S = 60.0
"""A kernel that has not answered by then is killed."""
on_both_stacks = pytest.mark.parametrize("stack", stacks.STACKS, indirect=True)
ANSI = re.compile(r"\x1b\[[0-9;]*m")
WIDGET = "application/vnd.jupyter.widget-view+json"


@dataclass
class Ran:
    """What a front end knows of a cell after it has run it."""

    status: str = ""
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    stdout: str = ""
    stderr: str = ""
    outputs: list[dict[str, Any]] = field(default_factory=list)
    """What is on the page at the end, in order: ``{"kind": "stream" | "error" | "execute_result" | "display_data", "data": bundle}``."""
    updates: list[dict[str, Any]] = field(default_factory=list)
    """The bundles of update_display_data."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    count: int = 0
    payload: list[dict[str, Any]] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def value(self) -> str | None:
        """Text of Out[n]."""
        return next((out["data"]["text/plain"] for out in self.outputs if out["kind"] == "execute_result"), None)

    @property
    def displays(self) -> list[dict[str, Any]]:
        """The bundles shown, as they stand at the end."""
        return [out["data"] for out in self.outputs if out["kind"] == "display_data"]

    @property
    def kinds(self) -> list[str]:
        return [out["kind"] for out in self.outputs]

    @property
    def text(self) -> str:
        """All that is to be read, in order."""
        return "\n".join(out["data"].get("text/plain", "") for out in self.outputs)


class Kernel:
    """A kernel process and the front end's channels to it; as a context manager, it is killed at the end of the block."""

    stack = ""

    def __init__(self, python: str, folder: Path) -> None:
        self.folder = folder
        env = {**os.environ, "IPYTHONDIR": str(folder / ".ipython"), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        self.manager = KernelManager()
        self.manager._kernel_spec = KernelSpec(
            argv=[python, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--HistoryManager.enabled=False", "--log-level=ERROR"],
            language="python",
        )
        self.manager.start_kernel(env=env, cwd=str(folder))
        self.client = self.manager.client()
        try:
            self.client.start_channels()
            self.client.wait_for_ready(timeout=START_S)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the kernel, which is also the id of the session that it leads."""
        provisioner: Any = self.manager.provisioner
        return int(provisioner.pid)

    def run(
        self,
        code: str,
        *,
        interrupt_s: float | None = None,
        interrupt_between: tuple[Path, Path] | None = None,
        interrupt_at: Callable[[Message], bool] | None = None,
        timeout_s: float = 60,
        silent: bool = False,
    ) -> Ran:
        """Run a cell to its end; with `interrupt_s`, press Stop so long after it has begun.

        With `interrupt_between`, so long after the cell has made the first file; the second is made when Stop was pressed. With
        `interrupt_at`, at the first message for which it is true.
        """
        ran, start = Ran(), time.monotonic()
        sent = self.client.execute(code, silent=silent, store_history=not silent, stop_on_error=False, allow_stdin=False)
        earlier: list[Message] = []
        if interrupt_s is not None:
            earlier = self.listen(is_begin, timeout_s)  # before the cell begins, Stop does nothing
            begun, pressed = interrupt_between or (None, None)
            if begun is not None:
                wait_until(begun.exists, timeout_s, f"the cell did not make {begun.name}")
            time.sleep(interrupt_s)
            start = time.monotonic()
            self.manager.interrupt_kernel()
            if pressed is not None:
                pressed.touch()
        if interrupt_at is not None:
            earlier = self.listen(interrupt_at, timeout_s)
            self.manager.interrupt_kernel()
        reply = self._reply(sent, timeout_s)
        ran.took_s = time.monotonic() - start
        messages = [*earlier, *self.listen(lambda message: is_end(message) and message["parent_header"].get("msg_id") == sent, timeout_s)]
        ran.messages = [message for message in messages if message["parent_header"].get("msg_id") == sent]
        shown: dict[str, dict[str, Any]] = {}
        for message in ran.messages:
            _take(ran, message["msg_type"], message["content"], shown)
        ran.status, ran.count = reply["status"], reply.get("execution_count", 0)
        ran.payload = reply.get("payload", [])
        if ran.status == "error":
            ran.ename, ran.evalue = reply["ename"], reply["evalue"]
        ran.stdout, ran.stderr = (
            "".join(out["data"]["text/plain"] for out in ran.outputs if out.get("name") == name) for name in ("stdout", "stderr")
        )
        return ran

    def value(self, expression: str) -> str | None:
        """The repr of an expression."""
        ran = self.run(f"print(repr({expression}))")
        assert ran.status == "ok", ran.traceback
        return ran.stdout.strip()

    def complete(self, code: str) -> list[str]:
        sent = self.client.complete(code)
        return list(self._reply(sent, 30)["matches"])

    def is_complete(self, code: str) -> str:
        return str(self._reply(self.client.is_complete(code), 30)["status"])

    def inspect(self, code: str) -> str:
        content = self._reply(self.client.inspect(code), 30)
        return ANSI.sub("", content["data"].get("text/plain", ""))

    def listen(self, until: Callable[[Message], bool], timeout_s: float = START_S) -> list[Message]:
        """What the kernel broadcasts, up to and including the first message for which `until` is true."""
        messages: list[Message] = []
        end = time.monotonic() + timeout_s
        try:
            while not messages or not until(messages[-1]):
                messages.append(self.client.get_iopub_msg(timeout=max(0.0, end - time.monotonic())))
        except queue.Empty:
            last = [str(message["content"])[-1000:] for message in messages[-3:]]
            msg = f"the kernel did not broadcast in {timeout_s} s what was waited for; it ended with {last}"
            raise TimeoutError(msg) from None
        return messages

    def kill(self, code: str, when_printed: str, *, after_s: float = 0.6) -> int:
        """Run a cell, kill the kernel so long after the cell has printed `when_printed`, and start it again; gives the cell's number."""
        self.client.execute(code)
        messages = self.listen(lambda message: message["content"].get("text", "").strip() == when_printed)
        time.sleep(after_s)  # so that whatever watches the cell has looked since
        os.kill(self.pid, signal.SIGKILL)
        self.restart(now=True)
        return next(int(message["content"]["execution_count"]) for message in messages if is_begin(message))

    def restart(self, *, now: bool = False) -> None:
        """Restart as the button does; with `now`, without asking the kernel to end."""
        before = self.pid
        self.manager.restart_kernel(now=now)
        processes.kill(before)
        processes.outlives_its_test(self.pid)
        with contextlib.suppress(TimeoutError):  # a message of the kernel before would pass for a sign that this one listens
            self.listen(lambda message: False, timeout_s=0.3)
        self.client.wait_for_ready(timeout=START_S)

    def stop(self) -> None:
        """Kill the kernel and every process in its session or below it; harmless where that was done before."""
        self.client.stop_channels()
        if self.manager.has_kernel:
            processes.kill(self.pid)
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()

    def _reply(self, sent: str, timeout_s: float) -> dict[str, Any]:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            try:
                message = self.client.get_shell_msg(timeout=max(0.1, end - time.monotonic()))
            except queue.Empty:
                break
            if message["parent_header"].get("msg_id") == sent:
                return dict(message["content"])
        self.manager.interrupt_kernel()
        msg = f"the kernel did not answer in {timeout_s} s"
        raise TimeoutError(msg)


def on_stacks(modern: Iterable[str], *, colab: Iterable[str]) -> list[ParameterSet]:
    """Pairs of a stack and a name, for ``parametrize(("stack", ...), ..., indirect=["stack"])``."""
    return [pytest.param(stack, name, id=f"{stack}-{name}") for stack, names in (("modern", modern), ("colab", colab)) for name in names]


def is_begin(message: Message) -> bool:
    """Whether a cell begins to run."""
    return bool(message["msg_type"] == "execute_input")


def is_end(message: Message) -> bool:
    """Whether the kernel has nothing more to run."""
    return bool(message["msg_type"] == "status" and message["content"]["execution_state"] == "idle")


def wait_until(holds: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
    """Wait until a condition holds; a TimeoutError says `otherwise` where it does not in time."""
    end = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > end:
            msg = f"{otherwise} in {timeout_s} s"
            raise TimeoutError(msg)
        time.sleep(0.01)


def _take(ran: Ran, kind: str, content: dict[str, Any], shown: dict[str, dict[str, Any]]) -> None:
    if kind == "stream":
        last = ran.outputs[-1] if ran.outputs else {}
        if last.get("name") == content["name"]:
            last["data"]["text/plain"] += content["text"]
        else:
            ran.outputs.append({"kind": "stream", "name": content["name"], "data": {"text/plain": content["text"]}})
    elif kind == "error":
        ran.traceback = ANSI.sub("", "\n".join(content["traceback"]))
        ran.outputs.append({"kind": "error", "data": {"text/plain": ran.traceback}})
    elif kind in {"execute_result", "display_data"}:
        out = {"kind": kind, "data": content["data"]}
        ran.outputs.append(out)
        if display_id := content.get("transient", {}).get("display_id"):
            shown[display_id] = out
    elif kind == "update_display_data":
        ran.updates.append(content["data"])
        if (updated := shown.get(content["transient"]["display_id"])) is not None:
            updated["data"] = content["data"]
