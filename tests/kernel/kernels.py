"""A real kernel, driven as a front end drives it."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

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
    """Starts at once; `run` waits for the cell's end."""

    stack = ""

    def __init__(self, python: str, folder: Path) -> None:
        self.folder = folder
        env = {
            **os.environ,
            "IPYTHONDIR": str(folder / ".ipython"),
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        }
        self.manager = KernelManager()
        self.manager._kernel_spec = KernelSpec(
            argv=[python, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--HistoryManager.enabled=False", "--log-level=ERROR"],
            language="python",
        )
        self.manager.start_kernel(env=env, cwd=str(folder))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(
        self,
        code: str,
        *,
        interrupt_s: float | None = None,
        interrupt_between: tuple[Path, Path] | None = None,
        timeout_s: float = 60,
        silent: bool = False,
    ) -> Ran:
        """Run a cell to its end; with `interrupt_s`, press Stop so long after it has begun.

        With `interrupt_between`, so long after the cell has made the first file; the second is made when Stop was pressed.
        """
        ran, start = Ran(), time.monotonic()
        sent = self.client.execute(code, silent=silent, store_history=not silent, stop_on_error=False, allow_stdin=False)
        earlier: list[dict[str, Any]] = []
        if interrupt_s is not None:
            while not earlier or earlier[-1]["msg_type"] != "execute_input":  # before it begins, Stop does nothing
                earlier.append(self.client.get_iopub_msg(timeout=timeout_s))
            while interrupt_between is not None and not interrupt_between[0].exists():
                time.sleep(0.01)
            time.sleep(interrupt_s)
            start = time.monotonic()
            self.manager.interrupt_kernel()
            if interrupt_between is not None:
                interrupt_between[1].touch()
        reply = self._reply(sent, timeout_s)
        ran.took_s = time.monotonic() - start
        shown: dict[str, dict[str, Any]] = {}
        while True:
            message = earlier.pop(0) if earlier else self.client.get_iopub_msg(timeout=timeout_s)
            if message["parent_header"].get("msg_id") != sent:
                continue
            ran.messages.append(message)
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
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

    def kill(self, code: str, when_shown: str) -> None:
        """Run a cell, and kill the kernel once the cell has printed `when_shown`; then start it again, as a front end does by itself."""
        pid = int(self.value("__import__('os').getpid()") or 0)
        self.client.execute(code)
        while self.client.get_iopub_msg(timeout=60)["content"].get("text", "").strip() != when_shown:
            pass
        time.sleep(0.6)  # so that the recorder has looked since
        os.kill(pid, signal.SIGKILL)
        self.restart(now=True)

    def restart(self, *, now: bool = False) -> None:
        """As the button does; with `now`, without asking the kernel to end."""
        self.manager.restart_kernel(now=now)
        with contextlib.suppress(queue.Empty):
            while True:  # what the kernel before has said would pass for a sign that this one is heard
                self.client.get_iopub_msg(timeout=0.1)
        self.client.wait_for_ready(timeout=60)

    def stop(self) -> None:
        self.client.stop_channels()
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
        if out := shown.get(content["transient"]["display_id"]):
            out["data"] = content["data"]
