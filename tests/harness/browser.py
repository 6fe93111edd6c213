"""Finds Chromium, and records a page's errors."""

import os
import re
import shutil
from dataclasses import dataclass, field

from playwright.sync_api import Page

DESKTOP, PHONE = (1280, 900), (390, 844)


def chromium() -> str | None:
    """The path of a Chromium, from `ACCRUE_CHROMIUM` or PATH; None if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("ACCRUE_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@dataclass
class PageErrors:
    """Errors on a page, and its requests to other hosts."""

    host: str
    """The only host that the page may send requests to."""
    faults: list[str] = field(default_factory=list)
    service_is_down: bool = False

    def watch(self, page: Page) -> None:
        page.on("pageerror", lambda error: self.faults.append(f"uncaught: {error}"))
        page.on("console", lambda message: self._on_console(message.type, message.text))
        page.on("request", lambda request: self._on_request(request.url))

    def _on_console(self, kind: str, text: str) -> None:
        expected = self.service_is_down and re.search("ERR_CONNECTION|ERR_INCOMPLETE|ERR_EMPTY", text)
        if kind == "error" and not expected:
            self.faults.append(text)

    def _on_request(self, url: str) -> None:
        if not url.startswith((self.host, "data:", "blob:")):
            self.faults.append(f"request to another host: {url}")
