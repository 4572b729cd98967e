"""A real run whose settings are hostile, and headless Chromium to look at its page with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser

from benchmarks.browser import NoBrowser, chromium
from evenpipe.cli.main import main

#: Between two measured times.
_STEP_MS = 0.5
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
    out.write_text(json.dumps(without_stalls(json.loads(out.read_text()))))
    return out


def without_stalls(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run's document with its measured times at even distances: a busy machine makes some actions too thin.

    The order in time stays.
    """
    spans = [span for stage in run["timeline"] for span in stage]
    times = sorted({span[end] for span in spans for end in ("start_ms", "end_ms")})
    even = [_STEP_MS * number for number in range(len(times))]
    for span in spans:
        for end in ("start_ms", "end_ms"):
            span[end] = even[times.index(span[end])]
    for point in (point for stage in run["memory"] for point in stage):
        point[0] = float(np.interp(point[0], times, even))
    return run


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """The machine's, if it has one."""
    with ExitStack() as stack:
        try:
            browser = stack.enter_context(chromium())
        except NoBrowser as error:
            pytest.skip(str(error))
        yield browser
