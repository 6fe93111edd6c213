"""Finds Chromium, and records a page's errors."""

import os
import re
import shutil
from dataclasses import dataclass, field

from playwright.sync_api import Page

DESKTOP, PHONE = (1280, 900), (390, 844)


def chromium() -> str | None:
    """Where a Chromium is: `ACCRUE_CHROMIUM`, or on the path; null where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("ACCRUE_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


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
