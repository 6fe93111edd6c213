"""Fixtures: a browser, and a page that collects errors and requests to other hosts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.harness.browser import DESKTOP, PageErrors, chromium
from tests.harness.service import Accrue, running


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
        accrue.start("worker", ACCRUE_INFERENCE="auto")
        yield accrue


@pytest.fixture
def noticed(service: Accrue) -> Iterator[PageErrors]:
    """The errors of a test's page; there must be none at the end."""
    noticed = PageErrors(service.url)
    yield noticed
    assert noticed.faults == []


@pytest.fixture
def page(browser: Browser, service: Accrue, noticed: PageErrors) -> Iterator[Page]:
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
