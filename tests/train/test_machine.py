"""Too little room for a run's processes is one line, before any of them starts."""

import os
import resource
import subprocess
import sys

import pytest

from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.search.finding import find_plan
from evenpipe.train.machine import check_room, least_bytes
from evenpipe.train.options import TrainOptions
from tests.partition.profiles import transformer

TRAIN = [sys.executable, "-m", "evenpipe", "train", "--stages", "2", "--layers", "2", "--iterations", "1"]


def refused(limit: int, hard: int, processes: int) -> str:
    """What a process with these limits of open files says."""
    code = (
        "import resource; from evenpipe.train.machine import check_room\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {hard}))\n"
        f"try: check_room({processes}); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "except ValueError as error: print(error)"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_few_open_files_are_said_before_the_start_and_a_soft_limit_is_raised() -> None:
    assert refused(70, 70, 2) == "open files: at most 70, and 2 processes need 80: ulimit -n 80, or more"
    assert refused(70, 1000, 2) == "80"


def test_a_full_folder_for_temporary_files_is_named(tmp_path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        done = subprocess.run(TRAIN, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True)
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith(
        f"TMPDIR {tmp_path}: 0.1 MiB free, and 4 are needed: free some there, or set TMPDIR to another folder"
    )


def test_too_little_shared_memory_is_named_before_the_start() -> None:
    alone = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    done = subprocess.run([*alone, *TRAIN], capture_output=True, text=True)
    said = "shared memory /dev/shm: 0.1 MiB free, and 4 are needed: remove what others have left there, or enlarge it"
    assert (done.returncode, done.stderr.strip()) == (2, f"evenpipe train: error: {said} (docker: --shm-size)")


def test_this_machine_has_room() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    check_room(2)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == before[1]


def test_a_plan_takes_its_stages_peaks_or_before_them_the_whole_model_in_each_process(tmp_path) -> None:
    """Two replicas of four stages, each of which has two parts and one peak."""
    path, profile = tmp_path / "P.json", transformer(8)
    plan = find_plan(profile, Workload("interleaved", 8, chunks=2), 4, 1 << 40)
    assert plan.model_bytes == sum(one.nbytes for one in profile.parameters) > 0
    plan.write(path)
    options = TrainOptions.of(partition=str(path), data_parallel=2)
    peaks = 2 * sum({part.stage: part.peak_bytes for part in plan.stages}.values())
    assert least_bytes(options) == peaks
    plan.model_copy(update={"model_bytes": peaks}).write(path)
    assert least_bytes(options) == 8 * peaks
