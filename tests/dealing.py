"""How the tests are dealt out to several workers: what shares a kernel or a page stays together, and what is long begins first.

``--dist loadgroup`` would do it by marks, but xdist 3.8 writes the group into a name that pytest 9.2 no longer reads: each test would
go its own way, and every kernel be started, and every notebook be run, in each of the workers.
"""

from __future__ import annotations

from zlib import crc32

from xdist.scheduler import LoadScopeScheduling

PARTS = {"test_cases.py": 4, "test_plants.py": 8, "test_reports.py": 2, "test_watch.py": 4}
"""Files of so many cases, or of such long ones, that all workers take some of them, by name."""


class Dealing(LoadScopeScheduling):
    """Whole files, in the order of the folders: browser, kernel and notebooks are the long ones; unit evens out the rest."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        if file.startswith("tests/browser/"):
            return "tests/browser"  # one JupyterLab for all
        if file.startswith("tests/kernel/") and not file.endswith("test_hang_cases.py"):
            return "tests/kernel"  # they share one kernel a stack
        if file.startswith("tests/notebooks/"):
            return f"{file}[{test.partition('[')[2]}"  # a notebook on a stack runs once for all the tests that read it
        parts = PARTS.get(file.rpartition("/")[2], 1)
        return f"{file}-{crc32(nodeid.encode()) % parts}"
