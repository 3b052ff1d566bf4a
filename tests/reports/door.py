"""Runs a report's notebook in a process of its own, through a real IPython shell, and compares what came out with the truth."""

from __future__ import annotations

import multiprocessing
import os
import re
import tempfile
import traceback
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from tests.reports.case import ReportCase

__all__ = ["Ran", "close", "compare", "run"]

LIMIT_S = 240.0
END_S = 2.0
"""A process that has answered may take so long to end by itself."""


@dataclass(frozen=True)
class Ran:
    """What a notebook left behind."""

    report: Any
    """The report's own object; None where the magic gave none."""
    works: bool
    crash: str = ""
    """Of the machinery, never of the user's cell."""


def close() -> None:
    """End the process that the others are forked from: a later test may want one of its own."""
    server: Any = forkserver._forkserver
    server._stop()
    server.set_forkserver_preload(["__main__"])


def run(case: ReportCase, *, repaired: bool = False) -> Ran:
    """Run the cells, or the repaired ones, in a forked process in which torch is already imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.reports.preload"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_notebook, args=(theirs, case.repaired if repaired else case.cells, case.works if repaired else ""))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(LIMIT_S) else Ran(None, works=False, crash=f"no end within {LIMIT_S:.0f} s")
    except EOFError:
        process.join()
        return Ran(None, works=False, crash=f"the process died (exit code {process.exitcode})")
    finally:
        process.join(END_S)
        process.kill()
        process.join()


def _holds(expression: str, names: dict[str, Any]) -> bool:
    """False, too, where a cell failed before it had made what is asked for."""
    try:
        return not expression or bool(eval(expression, names))
    except NameError:
        return False


def _notebook(sender: Connection, cells: tuple[str, ...], works: str) -> None:
    import torch
    from IPython.utils.capture import capture_output

    from tests.doors import in_process_shell

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # as in a kernel on Linux
    try:
        with tempfile.TemporaryDirectory() as folder, in_process_shell() as shell:
            os.chdir(folder)
            with capture_output():
                for cell in cells:
                    result = shell.run_cell(cell, store_history=True)
                    if result.error_before_exec is not None:
                        raise result.error_before_exec
                is_right = _holds(works, shell.user_ns)
            sender.send(Ran(shell.user_ns.get("r"), works=is_right))
    except BaseException:
        sender.send(Ran(None, works=False, crash=traceback.format_exc()))


def compare(case: ReportCase, ran: Ran, answer: Callable[[Any], Any]) -> dict[str, str]:
    """Each field that is wrong, with what was got; `answer` reads the report of this magic."""
    if ran.crash or ran.report is None:
        return {"crash": ran.crash or "no report"}
    got = answer(ran.report)
    text = "\n".join(filter(None, (ran.report.verdict, got.text, got.fix)))
    if case.healthy:
        return {"false alarm": text} if got.found else {}
    if not got.found:
        return {"missed": text}
    differs = {}
    if case.line and not set(case.places) & set(got.places):
        differs["line"] = f"{got.places}, not {case.places}"
    marked = {name: (places, case.marked(name)) for name, places in got.others}
    differs |= {name: f"{places}, not {right}" for name, (places, right) in marked.items() if right and not set(right) & set(places)}
    if case.op and not set(case.op) & set(got.ops):
        differs["op"] = f"{got.ops}, not {case.op}"
    if case.module and not set(case.module) & set(got.modules):
        differs["module"] = f"{got.modules}, not {case.module}"
    missing = [says for says in case.says if not re.search(says, text, re.IGNORECASE)]
    untrue = [never for never in case.never if re.search(never, text, re.IGNORECASE)]
    if missing or untrue:
        differs["cause"] = f"lacks {missing}, has {untrue}:\n{text}"
    if case.fix and not re.search(case.fix, got.fix, re.IGNORECASE):
        differs["fix"] = f"{got.fix!r} does not match {case.fix!r}"
    return differs
