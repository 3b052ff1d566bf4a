"""One JupyterLab and one Chromium for the tests of this folder; they end with it, as Playwright keeps an event loop running meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import sync_playwright

from tests.browser import lab as harness

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=harness.chromium(), headless=True, args=list(harness.CHROMIUM_FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[harness.Server]:
    with harness.serve(tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("state")) as server:
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    item.stash.setdefault(FAILED, False)
    item.stash[FAILED] |= report.failed
    return report


FAILED = pytest.StashKey[bool]()


@pytest.fixture
def lab(request: pytest.FixtureRequest, browser: Browser, server: harness.Server, root: Path) -> Iterator[harness.Lab]:
    """A page of JupyterLab; a test that fails leaves a picture of it in build/screens."""
    with harness.page_in(browser, server, root / "build/screens") as lab:
        yield lab
        if request.node.stash.get(FAILED, False):
            lab.picture(f"failed_{request.node.name}")
