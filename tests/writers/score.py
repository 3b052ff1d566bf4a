"""A line a row and door: ``python -m tests.writers.score [-d DOOR] [-k SUBSTRING] [--rows FILE.json]``."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from tests.writers import forms
from tests.writers.judge import judged
from tests.writers.outcome import notebooks
from tests.writers.writer import Writer
from tests.writers.writers import WRITERS, installed


def main() -> int:
    """Print the score; the exit status is the number of runs that are neither equal nor refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-d", action="append", choices=tuple(forms.DOORS), help="only this door")
    parser.add_argument("-k", default="", help="only rows whose name holds this")
    parser.add_argument("--rows", type=Path, help="rows as JSON in place of the table")
    options = parser.parse_args()
    rows = [Writer.from_dict(row) for row in json.loads(options.rows.read_text())] if options.rows else list(WRITERS)
    rows = [row for row in rows if options.k in row.name and installed(row.needs)]
    doors = options.d or list(forms.DOORS)
    counts: dict[str, Counter[str]] = {door: Counter() for door in doors}
    with notebooks() as run:
        for row in rows:
            for door in doors:
                judgement = judged(run, row, door)
                counts[door][judgement.status] += 1
                print(f"{'ok  ' if judgement.right else 'FAIL'} {row.name} {door}: {judgement}", flush=True)
    print()
    for door, statuses in counts.items():
        right = statuses["equal"] + statuses["refused"]
        rest = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
        print(f"{door}: {right} of {statuses.total()} ({rest})")
    return min(sum(sum(c.values()) - c["equal"] - c["refused"] for c in counts.values()), 100)


if __name__ == "__main__":
    raise SystemExit(main())
