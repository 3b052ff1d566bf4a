"""The command line: ``run INSTRUMENT [options] SCRIPT arguments...``; what follows the script is the script's."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchdebug_magics import catalog
from torchdebug_magics.instrument import writable_path
from torchdebug_magics.probing.after_import import AfterImport
from torchdebug_magics.run.outputs import Outputs
from torchdebug_magics.run.script import Script, show_error
from torchdebug_magics.run.watch import Watch

if TYPE_CHECKING:
    from torchdebug_magics.instrument import Instrument

__all__ = ["main"]

_PROGRAM = "python -m torchdebug_magics"


def main(arguments: Sequence[str]) -> None:
    """Run a script under an instrument. What the script raises is raised, when its traceback has been shown."""
    asked = _asked(arguments)
    row = catalog.instrument(asked.instrument)
    script = Script(asked.script[0], asked.script[1:], is_module=asked.is_module)
    watch = Watch(row, {option.name: getattr(asked, option.name) for option in row.options}, Outputs(row, asked.json, asked.html))
    error: BaseException | None = None
    try:
        with watch, AfterImport("torch", watch.open):
            script.run()
    except BaseException as raised:
        error = raised
        if not isinstance(raised, SystemExit):
            show_error(raised, script, watch.traceback_of)
            sys.excepthook = lambda *_: None  # Python ends with it as ever, and it is on the screen
        raise
    finally:
        if watch.is_here:
            watch.finish(error)


def _asked(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=_PROGRAM, description="Debug PyTorch from a terminal.")
    run = parser.add_subparsers(dest="command", required=True, metavar="COMMAND").add_parser(
        "run", help="run a script under an instrument", description="Run a script, or each rank of a job, under an instrument."
    )
    instruments = run.add_subparsers(dest="instrument", required=True, metavar="INSTRUMENT")
    for row in catalog.instruments():
        if row.probe is not None:
            _add(instruments.add_parser(row.name, help=row.summary.replace("%", "%%"), allow_abbrev=False), row)
    asked = parser.parse_args(arguments)
    asked.is_module = asked.module is not None
    asked.script = asked.module or asked.script
    if not asked.script:
        instruments.choices[asked.instrument].error("which script? write its file, or -m and the name of a module, behind the options")
    return asked


def _add(parser: argparse.ArgumentParser, row: Instrument) -> None:
    parser.usage = f"{_PROGRAM} run {row.name} [options] SCRIPT | -m MODULE [arguments of the script]"
    row.add_options(parser)
    rank = "; with {rank} in its name, each rank writes its own"
    parser.add_argument("--json", metavar="FILE", type=writable_path, help=f"write the report to a file{rank}")
    parser.add_argument("--html", metavar="FILE", type=writable_path, help=f"write the report as a page{rank}")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ...", help="run a module, as `python -m` does")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="what is run, and its arguments")
