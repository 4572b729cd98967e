"""A real run whose settings are hostile, and headless Chromium to look at its page with."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, sync_playwright

from evenpipe.cli.main import main

#: A folder and a file in it, which end up in the settings.
HOSTILE = Path("<img src=x onerror=document.title=1><", "script>document.title='taken over'<!-- \"'${1}")


@pytest.fixture(scope="package")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The document of a run on two stages."""
    folder = tmp_path_factory.mktemp("run")
    data, out = folder / HOSTILE, folder / "run.json"
    data.parent.mkdir()
    data.write_bytes(b"0123456789" * 50)
    sizes = {"stages": 2, "layers": 2, "hidden": 16, "heads": 2, "seq-length": 16, "micro-batches": 4, "iterations": 2}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    assert main(["train", "--engine", "module", "--bpipe", *words, "--data", str(data), "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Playwright's Chromium, or the machine's own."""
    names = ("chromium", "chromium-browser", "google-chrome")
    with sync_playwright() as playwright:
        installed = playwright.chromium.executable_path
        executable = installed if Path(installed).exists() else next(filter(None, map(shutil.which, names)), None)
        if executable is None:
            pytest.skip("no Chromium here: `playwright install chromium`, or the system's package of that name")
        try:
            browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        except Error as error:
            pytest.skip(f"{executable} does not start: {str(error).splitlines()[0]}")
        yield browser
        browser.close()
