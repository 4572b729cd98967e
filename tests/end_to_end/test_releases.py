"""Every supported megatron-core release trains to the same bits under EvenPipe as under its own schedules."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.releases

SCRIPT = Path(__file__).with_name("release_cases.py")
FOLDERS = [folder for folder in os.environ.get("EVENPIPE_MEGATRON_RELEASES", "").split(os.pathsep) if folder]


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """The script's run with each release. Two are under way at a time, since half of each is imports."""

    def run(folder: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": folder}
        return subprocess.run([sys.executable, SCRIPT], env=environment, timeout=800, capture_output=True, text=True)

    with ThreadPoolExecutor(2) as pool:
        yield {folder: pool.submit(run, folder) for folder in FOLDERS}


@pytest.mark.parametrize("folder", FOLDERS, ids=[Path(folder).name for folder in FOLDERS])
def test_a_release_trains_to_the_same_bits(folder, runs):
    run = runs[folder].result()
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout.splitlines()[-1])
    assert document["version"] in folder
    for setting, engines in document["results"].items():
        assert engines["evenpipe"] == engines["bpipe"] == engines["megatron"], setting


def test_releases_are_given_or_the_way_to_give_them_is_told():
    if not FOLDERS:
        pytest.skip(
            "set EVENPIPE_MEGATRON_RELEASES to folders that hold other megatron-core releases (make test-gate does)"
        )
