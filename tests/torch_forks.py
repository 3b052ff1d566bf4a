"""Runs scripts in processes that are forked from one that has imported torch, and nothing that torch imports later: `TorchForks`.

The server, ``python -m tests.torch_forks``, reads a JSON line for each script, and prints its number and exit code once it has ended.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import traceback
from contextlib import ExitStack
from pathlib import Path

from tests import children, processes


class TorchForks:
    """Starts the server with the first script, and again after a script that did not end in time."""

    def __init__(self) -> None:
        self._stack, self._server, self._count = ExitStack(), None, 0  # type: tuple[ExitStack, children.Child | None, int]

    def run(self, code: str, limit_s: float = children.LIMIT_S) -> children.Ended:
        """Run a script to its end, whatever its exit code, in the present folder."""
        if self._server is None:
            command = (sys.executable, "-W", "ignore", "-m", "tests.torch_forks")
            (self._server,) = self._stack.enter_context(children.launched(command, stdin=subprocess.PIPE))
            processes.outlives_its_test(self._server.process.pid)
        self._count += 1
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            request = {"number": self._count, "code": textwrap.dedent(code), "cwd": str(Path.cwd()), "out": str(out), "err": str(err)}
            pipe = self._server.process.stdin
            assert pipe is not None
            try:
                pipe.write(f"{json.dumps(request)}\n".encode())
                pipe.flush()
                reply = self._server.wait_for(f"{self._count} ", limit_s=limit_s)
            except BaseException:  # also the end of the test's time
                self.close()
                raise
            return children.Ended(int(reply), out.read_text(), err.read_text())

    def check(self, code: str, limit_s: float = children.LIMIT_S) -> str:
        """Run a script, which must end well, and return its standard output."""
        code_of_exit, out, err = self.run(code, limit_s)
        assert code_of_exit == 0, f"exit code {code_of_exit}\n{out[-2000:]}{err[-4000:]}"
        return out

    def close(self) -> None:
        """Kill the server and what it has forked."""
        self._server = None
        self._stack.close()


def _serve() -> None:
    import torch  # noqa: F401 - for the forks

    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        if not (pid := os.fork()):
            _run(request)
        print(request["number"], os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(request: dict[str, str]) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    code = 1
    try:
        os.chdir(request["cwd"])
        exec(compile(request["code"], "<script>", "exec"), {"__name__": "__main__"})
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
