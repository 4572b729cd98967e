"""A real run whose settings are hostile, and headless Chromium to look at its page with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from benchmarks.browser import NoBrowser, chromium
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
    """The machine's, if it has one."""
    with ExitStack() as stack:
        try:
            browser = stack.enter_context(chromium())
        except NoBrowser as error:
            pytest.skip(str(error))
        yield browser
