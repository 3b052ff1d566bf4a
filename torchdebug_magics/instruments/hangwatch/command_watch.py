"""Watches a command that runs in processes of its own, such as ``torchrun``, from outside."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torchdebug_magics.instruments.hangwatch.causes.judge import judged
from torchdebug_magics.instruments.hangwatch.everybody.looking_around import OthersProgress, link, look_around
from torchdebug_magics.instruments.hangwatch.everybody.participants import Look
from torchdebug_magics.instruments.hangwatch.getting_out import end_processes
from torchdebug_magics.instruments.hangwatch.main_thread.progress import Progress
from torchdebug_magics.instruments.hangwatch.report import HangFinding, HangReport
from torchdebug_magics.machine.process_state import process_state
from torchdebug_magics.ranks.agent import Agent
from torchdebug_magics.ranks.launching import Children

_EVERY_S = 0.5
_LEAST_LOOKS = 3
_ON_ERROR = "torchdebug_magics.instruments.hangwatch.waits.process_facts:error_facts"
_FOLDER, _REFUSAL = "TORCHDEBUG_AGENTS", "TORCHDEBUG_ON_ERROR"
_NAME = "sitecustomize"
# A process of the user's must start, whatever our agent does; one that does not answer is shown as a process without an agent.
_TEXT = f"""import contextlib
with contextlib.suppress(Exception):
    from {__name__} import begin
    begin(__file__)
"""


class OutsideWatch:
    """Runs one command, and watches the processes that it starts."""

    def __init__(self, command: Sequence[str], after_s: float, *, stops: bool) -> None:
        self.exit_code = 0
        self._command = list(command)
        self._after_s = after_s
        self._stops = stops

    def reports(self) -> Iterator[HangReport]:
        """Run the command to its end; a report whenever its processes have made no progress, for a reason that was not told before."""
        with tempfile.TemporaryDirectory(prefix="tdm", ignore_cleanup_errors=True) as folder:
            process = subprocess.Popen(self._command, env=environment_with_agents(folder, _ON_ERROR))  # noqa: S603 - the user's own command
            try:
                yield from self._watch(process, folder)
            except KeyboardInterrupt:
                end_processes([process.pid])
            finally:
                code = process.wait()
                self.exit_code = code if code >= 0 else 128 - code  # as a shell has it

    def _watch(self, process: subprocess.Popen[bytes], folder: str) -> Iterator[HangReport]:
        children = Children()
        children.folder = folder
        looks: deque[Look] = deque(maxlen=6)
        began_s = last_s = time.monotonic()
        told: set[str] = set()
        ranks: dict[int, int] = {}
        others = OthersProgress(any_code=True)
        while process.poll() is None:
            time.sleep(_EVERY_S)
            look = look_around(children)
            link(look, ranks)
            if process.poll() is not None or not _begin_at_ranks(look):
                continue
            now_s = time.monotonic()
            if others.note(look):
                last_s = now_s
                looks.clear()
            looks.append(look)
            if now_s - last_s < self._after_s or len(looks) < _LEAST_LOOKS:
                continue
            finding = judged(list(looks), Progress(), now_s - last_s)
            if finding.headline not in told and not (finding.state == "slow" and told):
                told.add(finding.headline)
                yield self._report(finding, now_s - began_s)
            if self._stops and finding.state == "stuck":
                end_processes([process.pid])

    def _report(self, finding: HangFinding, elapsed_s: float) -> HangReport:
        finding = replace(finding, waits=finding.waits[1:], chain=finding.chain[1:])  # without this process, which only waits
        return HangReport(
            **vars(finding), still_s=finding.since_s, elapsed_s=elapsed_s, after_s=self._after_s, rate=None, data_share=None,
            ended_by="--stop" if self._stops and finding.state == "stuck" else "itself", stopped_count=0,
        )  # fmt: skip


def _begin_at_ranks(look: Look) -> bool:
    """Let the chain go to the processes that do the work: one that has started another only waits. False where there are none."""
    main = look.main
    parents = {state.parent for one in look.everybody.values() if (state := process_state(one.pid)) is not None}
    workers = [one.who for one in look.everybody.values() if one is not main and one.is_main_thread and one.pid not in parents]
    main.kind, main.what, main.frames, main.targets = "join", "the command", [], workers
    main.facts = {"is_waiting": True}
    main.process = {**main.process, "rank": None, "collectives": None}
    return bool(workers)


def environment_with_agents(folder: str, on_error: str) -> Mapping[str, str]:
    """The variables for a command whose Python processes are to have agents; writes the `sitecustomize` into the folder."""
    Path(folder, f"{_NAME}.py").write_text(_TEXT, encoding="utf-8")
    package = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"), package)))
    return {**os.environ, "PYTHONPATH": path, _FOLDER: folder, _REFUSAL: on_error}


def begin(file: str) -> None:
    """Start the agent of this process, then run the `sitecustomize` that it would have had; `file` is ours."""
    folder = os.environ.get(_FOLDER, "")
    if Path(folder).is_dir():
        agent = Agent(folder, os.environ.get(_REFUSAL, ""))
        vars(sys)["_torchdebug_agent"] = agent  # held for the life of the process
        with contextlib.suppress(OSError):
            agent.begin()
    path = [place for place in sys.path if Path(place or ".").resolve() != Path(file).parent.resolve()]
    spec = importlib.machinery.PathFinder.find_spec(_NAME, path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
