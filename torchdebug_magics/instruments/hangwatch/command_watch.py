"""Watches a command that runs in processes of its own, such as ``torchrun``, from outside."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.hangwatch.everybody.links import link
from torchdebug_magics.instruments.hangwatch.everybody.looking_around import look_around
from torchdebug_magics.instruments.hangwatch.getting_out import end_processes
from torchdebug_magics.instruments.hangwatch.judge import judged
from torchdebug_magics.instruments.hangwatch.main_thread.progress import Progress
from torchdebug_magics.instruments.hangwatch.report import HangReport
from torchdebug_magics.machine.process_state import process_state
from torchdebug_magics.probing.children.launching import Children
from torchdebug_magics.probing.children.startup import environment_with_agents

if TYPE_CHECKING:
    from torchdebug_magics.instruments.hangwatch.everybody.participants import Look
    from torchdebug_magics.instruments.hangwatch.report import Finding

__all__ = ["OutsideWatch"]

_EVERY_S = 0.5
_LEAST_LOOKS = 3
_ON_ERROR = "torchdebug_magics.probing.waits.error_facts:error_facts"


class OutsideWatch:
    """Runs one command, and watches the processes that it starts."""

    def __init__(self, command: Sequence[str], after_s: float, *, stops: bool) -> None:
        self.exit_code = 0
        self._command = list(command)
        self._after_s = after_s
        self._stops = stops
        self._seen: set[object] = set()
        self._values: dict[str, object] = {}
        self._ranks: dict[int, int] = {}

    def reports(self) -> Iterator[HangReport]:
        """Run the command to its end; a report whenever its processes have made no progress, for a reason that was not told before."""
        folder = tempfile.mkdtemp(prefix="tdm")
        try:
            process = subprocess.Popen(self._command, env=environment_with_agents(folder, _ON_ERROR))  # noqa: S603 - the user's own command
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        try:
            yield from self._watch(process, folder)
        except KeyboardInterrupt:
            end_processes([process.pid])
        finally:
            code = process.wait()
            self.exit_code = code if code >= 0 else 128 - code  # as a shell has it
            shutil.rmtree(folder, ignore_errors=True)

    def _watch(self, process: subprocess.Popen[bytes], folder: str) -> Iterator[HangReport]:
        children = Children()
        children.folder = folder
        looks: deque[Look] = deque(maxlen=6)
        began_s = last_s = time.monotonic()
        told: set[str] = set()
        while process.poll() is None:
            time.sleep(_EVERY_S)
            look = look_around(children)
            link(look, self._ranks)
            if process.poll() is not None or not _begin_at_ranks(look):
                continue
            now_s = time.monotonic()
            if self._went_on(look):
                last_s = now_s
                looks.clear()
            looks.append(look)
            if now_s - last_s < self._after_s or len(looks) < _LEAST_LOOKS:
                continue
            finding = judged(list(looks), Progress(), now_s - last_s, Counter())
            if finding.headline not in told and not (finding.state == "slow" and told):
                told.add(finding.headline)
                yield self._report(finding, now_s - began_s)
            if self._stops and finding.state == "stuck":
                end_processes([process.pid])

    def _went_on(self, look: Look) -> bool:
        """Whether any process is at a new line, or has other values than before."""
        lines = {(one.who, frame) for one in look.everybody.values() if one.who != "main" for frame in one.frames}
        values = {one.who: one.at[2:] for one in look.everybody.values() if one.who != "main" and one.process}
        is_new = not lines <= self._seen or values != self._values
        self._seen |= lines
        self._values = dict(values)
        return is_new

    def _report(self, finding: Finding, elapsed_s: float) -> HangReport:
        return HangReport(
            state=finding.state, cause=finding.cause, headline=finding.headline, fix=finding.fix, reason=finding.reason,
            location=finding.location, root=finding.root, waits=finding.waits[1:], chain=finding.chain[1:], still_s=finding.since_s,
            elapsed_s=elapsed_s, after_s=self._after_s, rate=None, rate_of="step", remaining_s=None, data_share=None,
            ended_by="--stop" if self._stops and finding.state == "stuck" else "itself", stopped_count=0,
        )  # fmt: skip


def _begin_at_ranks(look: Look) -> bool:
    """Let the chain go to the processes that do the work: one that has started another only waits. False where there are none."""
    main = look.main
    parents = {state.parent for one in look.everybody.values() if (state := process_state(one.pid)) is not None}
    workers = [one.who for one in look.everybody.values() if one.who != "main" and one.is_main_thread and one.pid not in parents]
    main.kind, main.what, main.frames, main.targets = "join", "the command", [], workers
    main.facts = {"is_waiting": True}
    main.process = {**main.process, "rank": None, "collectives": None}
    return bool(workers)
