"""The machine's headless Chromium, which pages are looked at with."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from playwright.sync_api import Browser, Error, sync_playwright

__all__ = ["NoBrowser", "chromium"]

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")


class NoBrowser(RuntimeError):
    """There is none, or it does not start. The message is one line."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Playwright's Chromium, or the machine's own. Raises NoBrowser."""
    with sync_playwright() as playwright:
        installed = playwright.chromium.executable_path
        executable = installed if Path(installed).exists() else next(filter(None, map(shutil.which, _NAMES)), None)
        if executable is None:
            raise NoBrowser("no Chromium here: `playwright install chromium`, or the system's package of that name")
        try:
            browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        except Error as error:
            raise NoBrowser(f"{executable} does not start: {str(error).splitlines()[0]}") from None
        yield browser
        browser.close()
