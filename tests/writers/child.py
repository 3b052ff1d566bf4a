"""Runs cells, each notebook in a fork of its own, and looks at what they left: ``python child.py FOLDER`` reads jobs as JSON lines.

It is a file of its own, without an import of the tests, so that it runs with any checkout of the package on ``PYTHONPATH``.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import gzip
import hashlib
import importlib
import io
import json
import os
import signal
import socketserver
import sqlite3
import sys
import tarfile
import tempfile
import threading
import time
import traceback
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_OWN = ("model_", "optimizer_", "inputs_", "targets_", "loader_", "kept_", "loss_", "writers_report")


class _Counter(BaseHTTPRequestHandler):
    """Answers every request, and adds a byte to the file that the last part of its path names."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with Path("counts", Path(self.path).name).open("ab") as file:
            file.write(b"x")
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    do_GET = do_POST  # noqa: N815 - the name that the standard library calls

    def log_message(self, *words: Any) -> None:
        pass


def serve(folder: Path) -> tuple[int, int]:
    """Fork the server of requests; returns its port and its pid."""
    (folder / "counts").mkdir(exist_ok=True)
    socketserver.TCPServer.allow_reuse_address = True
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Counter)
    if (pid := os.fork()) == 0:
        os.chdir(folder)
        with contextlib.suppress(BaseException):
            server.serve_forever()
        os._exit(0)
    server.server_close()
    return server.server_port, pid


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    port, server = serve(folder)
    import numpy as np  # noqa: F401
    import psutil  # noqa: F401
    import torch
    import torch._dynamo  # noqa: F401 - the first optimizer of each fork would import it
    from IPython.core.interactiveshell import InteractiveShell  # noqa: F401

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    gc.freeze()
    import torchdebug_magics

    print("ready", torchdebug_magics.__file__, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        for module in job["imports"]:  # once for all forks
            importlib.import_module(module)
        ended = run(job, folder, port)
        print("done", job["id"], ended, flush=True)
    os.kill(server, signal.SIGKILL)


def run(job: dict[str, Any], folder: Path, port: int) -> str:
    """Run a job in a fork, for so long as it may take, and kill what it leaves."""
    import psutil

    root = folder / job["id"]
    for name in ("work", "other", "tmp", "aside"):
        (root / name).mkdir(parents=True)
    pid = os.fork()
    if pid == 0:
        try:
            Notebook(job, root, port, folder / "counts").run()
        except BaseException:
            (root / "aside" / "broken.txt").write_text(traceback.format_exc())
        finally:
            os._exit(0)
    until = time.monotonic() + job["limit_s"]
    ended = "late"
    while time.monotonic() < until:
        if os.waitpid(pid, os.WNOHANG)[0]:
            ended = "ended"
            break
        time.sleep(0.005)
    if ended == "late":
        with contextlib.suppress(psutil.Error):
            for child in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
                child.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return ended


class Notebook:
    """One job in its own process: its cells, then what they left."""

    def __init__(self, job: dict[str, Any], root: Path, port: int, counts: Path) -> None:
        self.job, self.root, self.counts = job, root, counts
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.out = root / "aside" / "out.txt"
        sys.stdout.flush()
        file = os.open(self.out, os.O_CREAT | os.O_RDWR | os.O_APPEND)
        for number in (1, 2):
            os.dup2(file, number)
        os.close(file)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), line_buffering=True, write_through=True)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), line_buffering=True, write_through=True)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(root / "work")
        os.environ.update(TMPDIR=str(root / "tmp"), IPYTHONDIR=str(root / "aside"), NO_PROXY="*", no_proxy="*", HOME=str(root / "aside"))
        os.environ["MPLBACKEND"] = "Agg"
        tempfile.tempdir = None
        self.prelude = {
            "OTHER": str(root / "other"), "HOST": "127.0.0.1", "PORT": port, "URL": f"http://127.0.0.1:{port}/{job['id']}",
        }  # fmt: skip
        self.errors: list[str] = []
        self.namespace: dict[str, Any] = {}

    def run(self) -> None:
        runs = self.notebook() if self.job["notebook"] else self.script()
        next(runs)
        environ = dict(os.environ)
        first, seeded, judged, finish = self.job["cells"]
        start = "import os, torch\ntorch.manual_seed(7)\nn = torch.zeros(())\n" + "".join(
            f"{key} = {value!r}\n" for key, value in self.prelude.items()
        )
        for cell in (start, first, seeded):
            runs.send(cell)
        if self.errors:
            raise RuntimeError(self.errors)
        began = time.monotonic()
        begins_at = self.out.stat().st_size
        runs.send(judged)
        seconds = time.monotonic() - began
        sys.stdout.flush()
        printed = self.plain(self.out.read_bytes()[begins_at:].decode(errors="replace"))
        errors, self.errors = self.errors, []
        report = self.report()
        variables = self.variables()
        runs.send(finish)
        threads = self.threads()
        result = {
            "files": self.files(), "variables": variables, "after": self.variables(), "cwd": self.plain(self.cwd()),
            "environ": {key: self.plain(str(os.environ.get(key))) for key in sorted({*environ, *os.environ})
                        if environ.get(key) != os.environ.get(key)},
            "requests": self.requests(), "threads": threads, "processes": self.processes(),
            "printed": [line for line in printed.splitlines() if line.startswith("cell: ")],
            "text": printed, "errors": errors, "finish_errors": self.errors, "seconds": round(seconds, 2), **report,
        }  # fmt: skip
        (self.root / "aside" / "outcome.json").write_text(json.dumps(result))

    def script(self) -> Any:
        """Cells as a script, each from a real file, with `__main__` as it is for a user."""
        main = ModuleType("__main__")
        sys.modules["__main__"], self.namespace = main, vars(main)
        source, number = "", 0
        while True:
            source = yield
            number += 1
            file = self.root / "aside" / f"script_{number}.py"
            file.write_text(source)
            try:
                exec(compile(source, str(file), "exec", dont_inherit=True), self.namespace)
            except BaseException as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                traceback.print_exc()

    def notebook(self) -> Any:
        """Cells in an IPython with the extension loaded."""
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config

        shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
        shell.run_line_magic("load_ext", "torchdebug_magics")
        self.namespace = shell.user_ns
        while True:
            source = yield
            result = shell.run_cell(source, store_history=True)
            if error := result.error_before_exec or result.error_in_exec:
                self.errors.append(f"{type(error).__name__}: {error}")

    def report(self) -> dict[str, Any]:
        """The report's text and its plain values, or what it is instead."""
        session = self.namespace.get("writers_session")
        report = self.namespace.get("writers_report") if session is None else session.report
        if report is None:
            return {"report": None, "verdict": ""}
        try:
            values = report.to_dict()
        except Exception:
            values = {"broken": traceback.format_exc()}
        return {"report": json.loads(json.dumps(values, default=str)), "verdict": str(getattr(report, "verdict", "")), "shown": str(report)}

    def plain(self, text: str) -> str:
        return text.replace(str(self.root), "<folder>").replace(self.prelude["URL"], "<url>")

    def cwd(self) -> str:
        try:
            return str(Path.cwd())
        except OSError as error:
            return f"{type(error).__name__}"

    def variables(self) -> dict[str, Any]:
        return {name: self.value(self.namespace[name]) for name in self.job["names"] if name in self.namespace and name not in _OWN}

    def value(self, value: Any, depth: int = 0) -> Any:
        """A value as plain data, exact; of what has none, its type and how far a file has been read or written."""
        import numpy as np
        import torch

        match value:
            case None | bool() | int() | float():
                plain: Any = value
            case str() | Path():
                plain = self.plain(str(value))
            case bytes():
                plain = value.decode("latin-1")
            case torch.Tensor() | np.ndarray():
                plain = [type(value).__name__, *value.flatten().tolist()[:64]]
            case torch.nn.Module():
                plain = ["module", *(float(tensor.double().sum()) for tensor in value.state_dict().values())]
            case torch.UntypedStorage():
                plain = ["storage", *value.tolist()[:64]]
            case list() | tuple() if depth < 4:
                plain = [self.value(each, depth + 1) for each in value]
            case dict() if depth < 4:
                plain = {str(key): self.value(each, depth + 1) for key, each in value.items()}
            case io.IOBase():
                plain = [type(value).__name__, "closed" if value.closed else _position(value)]
            case _:
                plain = f"<{type(value).__name__}>"
        return plain

    def threads(self) -> list[str]:
        """Threads of Python that still run, a moment after the last cell."""
        time.sleep(0.05)
        return sorted(thread.name.split("-")[0] for thread in threading.enumerate() if thread is not threading.main_thread())

    def processes(self) -> list[str]:
        import psutil

        left = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    left.append(" ".join(process.cmdline()[:2]).rpartition("/")[2])
                process.kill()
        return sorted(left)

    def requests(self) -> int:
        file = self.counts / self.job["id"]
        return file.stat().st_size if file.exists() else 0

    def files(self) -> list[list[Any]]:
        """Every entry of the three folders: its path, its kind and mode, and its content; hard links of one another by number."""
        tops = (sorted((self.root / top).rglob("*")) for top in ("work", "other", "tmp"))
        entries = [(path, os.lstat(path)) for paths in tops for path in paths]
        inodes: dict[int, int] = {}
        result = []
        for path, state in entries:
            name, mode = str(path.relative_to(self.root)), oct(state.st_mode & 0o7777)
            if path.is_symlink():
                result.append([name, "link", "", self.plain(str(path.readlink()))])
            elif path.is_dir():
                result.append([name, "folder", mode, ""])
            elif path.is_file():
                if state.st_nlink > 1:
                    mode += f" linked {inodes.setdefault(state.st_ino, len(inodes))} of {state.st_nlink}"
                result.append([name, "file", mode, content(path, self.root)])
            else:
                result.append([name, "special", mode, ""])
        return result


def content(path: Path, root: Path) -> str:
    """What a file holds: of an archive its members without their times, of a long file its digest."""
    if path.stat().st_size > 1 << 24:
        digest = hashlib.sha1(usedforsecurity=False)
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
        return f"{path.stat().st_size} bytes {digest.hexdigest()}"
    if path.parts[-2:] == (".git", "index"):  # holds the times of files
        return "an index"
    data = path.read_bytes()
    try:
        if (members := _members(path, data)) is not None:
            return members
    except Exception as error:
        return f"damaged: {type(error).__name__}: {error}: {short(data)}"
    return short(data.replace(str(root).encode(), b"<folder>"))


def _members(path: Path, data: bytes) -> str | None:
    """What an archive, a compressed file or a database holds; None of any other file."""
    members: Any = None
    if data[:2] == b"PK" and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            infos = [info for info in archive.infolist() if "/code/" not in info.filename]  # of TorchScript: not the same from run to run
            members = [[info.filename, short(archive.read(info))] for info in infos]
    elif data[:2] == b"\x1f\x8b":
        members = short(gzip.decompress(data))
    elif data[:16] == b"SQLite format 3\0":
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            members = list(database.iterdump())
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as tar:
            members = [[info.name, info.mode, short(tar.extractfile(info).read()) if info.isfile() else ""] for info in tar]
    return None if members is None else json.dumps(members)


def _position(file: Any) -> int | str:
    try:
        return file.tell()
    except (OSError, ValueError) as error:
        return str(error)


def short(data: bytes) -> str:
    text = data.decode("latin-1")
    return text if len(data) <= 400 else f"{len(data)} bytes {hashlib.sha1(data, usedforsecurity=False).hexdigest()}: {text[:60]!r}"


if __name__ == "__main__":
    main()
