"""Watch a command from a terminal: ``python -m torchdebug_magics.hangwatch --after 30 -- torchrun --nproc-per-node 2 train.py``.

Every Python process that the command starts gets an agent. When none of them has made progress for a while, the report is printed that
``%%hangwatch`` shows in a notebook. The command's exit code is passed on.
"""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str]) -> int:
    """Run the command that follows ``--``; the exit code is its own."""
    from torchdebug_magics import catalog  # noqa: PLC0415 - `import torchdebug_magics.hangwatch` costs nothing
    from torchdebug_magics.html import plain  # noqa: PLC0415 - as above
    from torchdebug_magics.instruments.hangwatch.watcher import OutsideWatch  # noqa: PLC0415 - as above

    parser = argparse.ArgumentParser(prog="python -m torchdebug_magics.hangwatch", description="Watch a command, and say why it hangs.")
    parser.add_argument("--after", type=float, default=10.0, metavar="N", help="seconds without progress until it looks closely (10)")
    parser.add_argument("--stop", action="store_true", help="end the command once it is certainly stuck")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after `--`: the command to run")
    asked = parser.parse_args(arguments)
    row = catalog.instrument("hangwatch")
    watch = OutsideWatch(asked.command, asked.after, stops=asked.stop)
    try:
        for report in watch.reports():
            print(plain.render(row.page(report)), file=sys.stderr, flush=True)  # noqa: T201 - a terminal is the screen
    except OSError as error:
        print(f"{asked.command[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201 - a terminal is the screen
        return 127  # as a shell says it
    return watch.exit_code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

# Imported as a module, it is the instrument of that name, which is also an attribute of the package.
sys.modules[__name__] = __import__("torchdebug_magics.catalog", fromlist=["instrument"]).instrument("hangwatch")
