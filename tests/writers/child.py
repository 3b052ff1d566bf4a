"""Runs cells, each notebook in a fork of its own, and looks at what they left: ``python child.py FOLDER`` reads jobs as JSON lines.

It is a file of its own, without an import of the tests, so that it runs with any checkout of the package on ``PYTHONPATH``.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import signal
import socketserver
import sys
import time
import traceback
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

    do_GET = do_POST

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
    import numpy  # noqa: F401
    import psutil  # noqa: F401
    import torch
    import torch._dynamo  # what the first optimizer would import in each fork
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
        import tempfile

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
        start = "import os, torch\ntorch.manual_seed(7)\nn = torch.zeros(())\n" + "".join(f"{key} = {value!r}\n" for key, value in self.prelude.items())
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
        held = self.variables()
        runs.send(finish)
        threads = self.threads()
        result = {
            "files": self.files(), "variables": held, "after": self.variables(), "cwd": self.plain(self.cwd()),
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
        report = self.namespace.get("writers_report")
        if report is None:
            return {"report": None, "verdict": ""}
        try:
            values = report.to_dict()
        except Exception:
            values = {"broken": traceback.format_exc()}
        return {"report": json.loads(json.dumps(values, default=str)), "verdict": str(getattr(report, "verdict", "")), "shown": str(report)}

    def plain(self, text: str) -> str:
        return text.replace(str(self.root), "<folder>")

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

        if isinstance(value, torch.Tensor):
            return ["tensor", *value.detach().flatten().tolist()[:64]]
        if isinstance(value, np.ndarray):
            return ["array", *value.flatten().tolist()[:64]]
        if isinstance(value, torch.nn.Module):
            return ["module", *(float(tensor.double().sum()) for tensor in value.state_dict().values())]
        if isinstance(value, torch.UntypedStorage):
            return ["storage", *value.tolist()[:64]]
        if isinstance(value, str | Path):
            return self.plain(str(value))
        if value is None or isinstance(value, int | float):
            return value
        if isinstance(value, bytes):
            return value.decode("latin-1")
        if isinstance(value, list | tuple) and depth < 4:
            return [self.value(each, depth + 1) for each in value]
        if isinstance(value, dict) and depth < 4:
            return {str(key): self.value(each, depth + 1) for key, each in value.items()}
        if hasattr(value, "tell") and hasattr(value, "closed"):
            try:
                return [type(value).__name__, "closed" if value.closed else value.tell()]
            except (OSError, ValueError) as error:
                return [type(value).__name__, str(error)]
        return f"<{type(value).__name__}>"

    def threads(self) -> list[str]:
        """Threads of Python that still run, a moment after the last cell."""
        import threading

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
        entries, inodes = [], {}
        for top in ("work", "other", "tmp"):
            for path in sorted((self.root / top).rglob("*")):
                entries.append((path, os.lstat(path)))
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
    import gzip
    import hashlib
    import sqlite3
    import tarfile
    import zipfile

    if path.stat().st_size > 1 << 24:
        digest = hashlib.sha1(usedforsecurity=False)
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
        return f"{path.stat().st_size} bytes {digest.hexdigest()}"
    data = path.read_bytes()
    try:
        if zipfile.is_zipfile(path) and data[:2] == b"PK":
            with zipfile.ZipFile(path) as archive:
                return json.dumps([[info.filename, short(archive.read(info))] for info in archive.infolist()])
        if data[:2] == b"\x1f\x8b":
            return "gzip " + short(gzip.decompress(data))
        if data[:16] == b"SQLite format 3\0":
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
                return "\n".join(database.iterdump())
        if tarfile.is_tarfile(path):
            with tarfile.open(path) as tar:
                return json.dumps([[info.name, info.mode, short(tar.extractfile(info).read()) if info.isfile() else ""] for info in tar])
    except Exception as error:
        return f"damaged: {type(error).__name__}: {error}: {short(data)}"
    return short(data.replace(str(root).encode(), b"<folder>"))


def short(data: bytes) -> str:
    import hashlib

    text = data.decode("latin-1")
    return text if len(data) <= 400 else f"{len(data)} bytes {hashlib.sha1(data, usedforsecurity=False).hexdigest()}: {text[:60]!r}"


if __name__ == "__main__":
    main()
