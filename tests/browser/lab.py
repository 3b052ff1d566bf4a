"""A real JupyterLab in headless Chromium, on loopback alone."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat

from tests import processes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from playwright.sync_api import Browser, ConsoleMessage, Locator, Page

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROME_ON_A_MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")

CHROMIUM_FLAGS = (
    "--no-sandbox",  # root in a container has no user namespaces
    "--disable-dev-shm-usage",  # nor much of /dev/shm
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # what is shown must need nothing from outside
)

SETTINGS: dict[str, dict[str, object]] = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
    "notebook-extension/tracker": {"windowingMode": "none"},  # cells that are out of sight are drawn, too
}
WIDGET_FAILURES = ("Error displaying widget", "Loading widget", "model not found", "Failed to load model class")
LIGHT, DARK = "JupyterLab Light", "JupyterLab Dark"

# The toolbar says "idle" before there is a kernel, and "run all" does nothing without a current notebook: ask the application itself.
READY = """() => {
    const widget = window.jupyterapp?.shell?.currentWidget;
    return widget?.context?.isReady && widget.sessionContext?.isReady && widget.sessionContext.session?.kernel?.status === 'idle';
}"""

# Each cell that holds code has a number, in the order of the notebook; a cell that still waits has none.
EACH_RAN = """() => {
    const cells = [...window.jupyterapp.shell.currentWidget.content.model.cells].filter(cell => cell.type === 'code');
    return cells.every(cell => cell.executionCount && cell.executionState !== 'running');
}"""

# The text of a cell's outputs, without the prompts beside them.
TEXT = """cell => [...cell.querySelectorAll('.jp-OutputArea-output')].map(output => output.innerText.trim()).join('\\n')"""

# Every text that a cell showed, in the order in which they were first seen, while cells run.
WATCH = f"""() => {{
    const textOf = {TEXT};
    window.seenTexts = [];
    const look = () => {{
        for (const cell of document.querySelectorAll('.jp-CodeCell')) {{
            const text = textOf(cell);
            if (text && !window.seenTexts.includes(text)) window.seenTexts.push(text);
        }}
    }};
    new MutationObserver(look).observe(document.body, {{childList: true, subtree: true, characterData: true, attributes: true}});
}}"""

RUN_ALL = """() => {
    window.runEnded = false;
    const end = () => { window.runEnded = true; };
    window.jupyterapp.commands.execute('notebook:run-all-cells').then(end, end);
}"""


def chromium() -> str:
    """The browser of this machine; a missing one is a failure."""
    named = os.environ.get("TORCHDEBUG_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None) or (CHROME_ON_A_MAC.exists() and str(CHROME_ON_A_MAC))
    if not found:
        msg = "no Chromium here: run `make browser`, or set TORCHDEBUG_CHROMIUM"
        raise RuntimeError(msg)
    return found


@dataclass
class Server:
    """A running JupyterLab; notebooks lie in `folder`."""

    url: str
    token: str
    folder: Path
    state: Path


@contextlib.contextmanager
def serve(folder: Path, state: Path) -> Iterator[Server]:
    """Start JupyterLab on `folder`; all else that it writes goes under `state`."""
    for name, values in SETTINGS.items():
        file = state / f"settings/@jupyterlab/{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(values))
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folders = {
        "IPYTHONDIR": "ipython",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
    }
    environment = os.environ | {name: str(state / part) for name, part in folders.items()} | {"JUPYTER_PREFER_ENV_PATH": "1"}
    token, log = secrets.token_hex(16), state / "lab.log"
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        *("--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"),
        *(f"--ServerApp.root_dir={folder}", f"--IdentityProvider.token={token}"),
        *("--LabApp.expose_app_in_browser=True", "--LabApp.extension_manager=readonly", "--LabApp.news_url="),
    ]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            server = Server(f"http://127.0.0.1:{port}", token, folder, state)
            _wait_until_it_answers(server, process, log)
            yield server
        finally:
            _end(process)


def _wait_until_it_answers(server: Server, process: subprocess.Popen[bytes], log: Path, *, limit_s: float = 90) -> None:
    end = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/api/status?token={server.token}", timeout=2):
            return
        if process.poll() is not None or time.monotonic() > end:
            msg = f"JupyterLab did not start:\n{log.read_text()[-3000:]}"
            raise RuntimeError(msg)
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    """On SIGTERM the server also ends its kernels; what is left then is killed."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(15)
    processes.kill(process.pid)
    process.wait(15)


@dataclass
class Lab:
    """One notebook, open in a page."""

    server: Server
    page: Page
    screens: Path
    console_errors: list[str] = field(default_factory=list)
    name: str = ""

    def __post_init__(self) -> None:
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.console_errors.append(f"uncaught: {error}"))

    def _note(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.console_errors.append(f"{message.text} {message.location.get('url', '')}".strip())

    @property
    def file(self) -> Path:
        return self.server.folder / self.name

    def open(self, name: str, cells: Sequence[str] | None = None, *, may_stop: bool = False) -> None:
        """Open the notebook `name`, written from `cells` (after one that `may_stop` the next is run), and wait for its kernel."""
        self.name = name
        if cells is not None:
            tags = {"tags": ["raises-exception"] if may_stop else []}
            document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip("\n"), metadata=tags) for cell in cells])
            document.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
            nbformat.write(document, self.file)
        self.page.goto(f"{self.server.url}/lab/tree/{name}?reset&token={self.server.token}", wait_until="domcontentloaded")
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=90_000)
        self.page.wait_for_function(READY, timeout=90_000)
        if self.page.evaluate("() => !window.jupyterapp.shell.leftCollapsed"):
            self.command("application:toggle-left-area")

    def command(self, name: str, **arguments: object) -> None:
        """Run a command of JupyterLab and wait until it is done."""
        self.page.evaluate("([name, args]) => window.jupyterapp.commands.execute(name, args).then(() => null)", [name, arguments])

    def theme(self, name: str) -> None:
        self.command("apputils:change-theme", theme=name)
        self.page.wait_for_selector(f"body[data-jp-theme-name='{name}']", state="attached")
        self.page.wait_for_selector("#jupyterlab-splash", state="detached")

    def start_all(self) -> None:
        """Begin to run all cells; what the outputs show meanwhile is noted."""
        self.page.evaluate(WATCH)
        self.page.evaluate(RUN_ALL)

    def wait_for_end(self, *, limit_s: float = 180) -> None:
        """Wait until no cell runs."""
        self.page.wait_for_function("() => window.runEnded", timeout=limit_s * 1000)
        self.page.wait_for_function(READY, timeout=limit_s * 1000)

    def wait_for_each_cell(self, *, limit_s: float = 180) -> None:
        """Wait until all cells ran; where one may stop, JupyterLab calls the run ended, and goes on with the next."""
        self.page.wait_for_function(EACH_RAN, timeout=limit_s * 1000)
        self.wait_for_end(limit_s=limit_s)

    def seen_texts(self) -> list[str]:
        """The distinct texts of outputs since `start_all`."""
        texts: list[str] = self.page.evaluate("() => window.seenTexts")
        return texts

    def run_all(self) -> list[str]:
        """Run all cells to the end; the distinct texts that outputs showed."""
        self.start_all()
        self.wait_for_end()
        return self.seen_texts()

    def cell(self, number: int) -> Locator:
        """A code cell, counted from 0."""
        return self.page.locator(".jp-CodeCell").nth(number)

    def text(self, cell: int) -> str:
        """What the outputs of a cell say."""
        text: str = self.cell(cell).evaluate(TEXT)
        return text

    def tables(self, cell: int) -> Locator:
        """The tables in the outputs of a cell."""
        return self.cell(cell).locator(".jp-OutputArea-output table")

    def save(self) -> dict[str, Any]:
        """Save; the notebook as it is in the file."""
        self.command("docmanager:save")
        document: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8"))
        return document

    def reopen_with_a_new_kernel(self) -> None:
        """What a reader of a saved notebook sees: the old kernel is gone, and nothing runs by itself."""
        self.page.evaluate("() => window.jupyterapp.serviceManager.sessions.shutdownAll()")
        self.page.reload(wait_until="domcontentloaded")
        self._wait_until_ready()

    def picture(self, name: str) -> None:
        """The page as it is now."""
        self.screens.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(self.screens / f"{name}.png"))


@contextlib.contextmanager
def page_in(browser: Browser, server: Server, screens: Path) -> Iterator[Lab]:
    """A fresh page, and the end of its kernels."""
    page = browser.new_page(viewport={"width": 1200, "height": 1000})
    try:
        yield Lab(server, page, screens)
        page.evaluate("() => window.jupyterapp?.serviceManager.sessions.shutdownAll()")
    finally:
        page.close()
