"""A browser of the tests' own, and a page that notes whatever a user would not want to see."""

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.acceptance.conftest import Accrue, running

DESKTOP, PHONE = (1280, 900), (390, 844)


def chromium() -> str | None:
    """Where a Chromium is: `ACCRUE_CHROMIUM`, or on the path; null where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("ACCRUE_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium()  # playwright's event loop is the thread's own for so long: other modules have theirs
    if path is None:
        pytest.skip("no Chromium here: make test-browser installs one")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Accrue]:
    """A service and a worker."""
    with running(tmp_path_factory.mktemp("accrue")) as accrue:
        accrue.serve()
        accrue.start("worker")
        yield accrue


@dataclass
class Noticed:
    """What was wrong on a page, or went elsewhere."""

    host: str
    """The only one that may be asked."""
    faults: list[str] = field(default_factory=list)
    service_is_away: bool = False

    def watch(self, page: Page) -> None:
        page.on("pageerror", lambda error: self.faults.append(f"uncaught: {error}"))
        page.on("console", lambda message: self._said(message.type, message.text))
        page.on("request", lambda request: self._asked(request.url))

    def _said(self, kind: str, text: str) -> None:
        expected = self.service_is_away and re.search("ERR_CONNECTION|ERR_INCOMPLETE|ERR_EMPTY", text)
        if kind == "error" and not expected:
            self.faults.append(text)

    def _asked(self, url: str) -> None:
        if not url.startswith((self.host, "data:", "blob:")):
            self.faults.append(f"asked elsewhere: {url}")


@pytest.fixture
def noticed(service: Accrue) -> Iterator[Noticed]:
    """Checked at the end of every test."""
    noticed = Noticed(service.url)
    yield noticed
    assert noticed.faults == []


@pytest.fixture
def page(browser: Browser, service: Accrue, noticed: Noticed) -> Iterator[Page]:
    """On a desktop, with its own storage."""
    context = browser.new_context(
        viewport={"width": DESKTOP[0], "height": DESKTOP[1]},
        base_url=f"{service.url}/",
        reduced_motion="reduce",
    )
    page = context.new_page()
    noticed.watch(page)
    yield page
    context.close()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums to learn."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    lines = [f'{{"prompt": "{a} + {b} =", "completion": " {a + b}"}}' for a in range(20) for b in range(10)]
    path.write_text("\n".join(lines) + "\n")
    return path
