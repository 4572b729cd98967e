"""Runs that are stopped, killed or out of room, and gone on with: nothing is lost, and no bit differs."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evenpipe.megatron.trainer.checkpoint import find
from evenpipe.megatron.trainer.launch import run_cases
from evenpipe.megatron.trainer.options import TrainOptions
from tests.end_to_end.running import Run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds a session's processes in /proc")

TINY = {"stages": 2, "layers": 2, "hidden": 16, "heads": 2, "seq_length": 16, "micro_batches": 4}
SMALL = {"hidden": 16, "heads": 2, "seq_length": 16, "micro_batches": 4, "stages": 2, "iterations": 6}
SETTINGS = {
    "pp2, dropout": {"dropout": 0.1, "lr_decay": "cosine", "lr_warmup": 4},
    "pp2, momentum": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "model": "bert", "engine": "megatron"},
    "pp2, fp16": {"precision": "fp16", "initial_loss_scale": 2.0**22, "schedule": "interleaved", "chunks": 2},
    "pp2, 2bw": {"schedule": "2bw", "dropout": 0.1, "lr_decay": "cosine", "bpipe": True},
    "pp2, 2bw, fp16": {"schedule": "2bw", "precision": "fp16", "initial_loss_scale": 2.0**22, "clip_grad": 0.1},
    "pp2, 2bw, unclipped": {"schedule": "2bw", "optimizer": "sgd", "momentum": 0.9, "clip_grad": 0.0},
    "dp2 pp2, 2bw, bf16": {
        "schedule": "2bw",
        "data_parallel": 2,
        "distributed_optimizer": True,
        "precision": "bf16",
        "dropout": 0.1,
    },
    "dp2 pp2, bf16": {"data_parallel": 2, "distributed_optimizer": True, "precision": "bf16", "dropout": 0.1},
    "dp2 pp2": {"data_parallel": 2, "distributed_optimizer": True, "bpipe": True},
    "pp2, kfkb, auto": {
        "schedule": "kfkb",
        "group_size": "auto",
        "retune_interval": 3,
        "memory_gib": 1.0,
        "micro_batch_size": 2,
        "dropout": 0.1,
    },
    "pp4, 2bw, bpipe": {"schedule": "2bw", "bpipe": True, "stages": 4, "layers": 4, "micro_batches": 5},
}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[object, ...]]:
    """Of every setting a run that saved on its way, and one that went on from there."""
    cases = []
    for setting in SETTINGS.values():
        folder = str(tmp_path_factory.mktemp("run"))
        options = {**SMALL, "layers": 4, **setting}
        cases.append(TrainOptions.of(**options, save=folder, save_interval=4))
        cases.append(TrainOptions.of(**options, load=f"{folder}/iter_0000004"))
    results = iter(run_cases(cases))
    return dict(zip(SETTINGS, zip(results, results, strict=True), strict=True))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_that_is_gone_on_with_has_the_bits_of_one_that_did_not_stop(
    name: str, resumed: dict[str, tuple[object, ...]]
) -> None:
    whole, rest = resumed[name]
    assert rest.first_iteration == 4
    assert [loss.hex() for loss in rest.losses] == [loss.hex() for loss in whole.losses[4:]]
    assert rest.grad_norms == whole.grad_norms[4:]
    assert rest.weights_sha256 == whole.weights_sha256


def test_with_and_without_a_second_weight_version_a_run_goes_on_from_the_newest_weights(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def cases(first: str, second: str) -> list[TrainOptions]:
        options = {**TINY, "micro_batches": 2, "iterations": 3}
        return [
            TrainOptions.of(**options, schedule=first, save=str(tmp_path / first)),
            TrainOptions.of(**{**options, "iterations": 4}, schedule=second, load=str(tmp_path / first)),
        ]

    run_cases([*cases("1f1b", "2bw"), *cases("2bw", "1f1b")])
    assert capfd.readouterr().err.splitlines() == [
        f"evenpipe: --load {tmp_path}/1f1b/iter_0000003: the checkpoint has one version of the weights: "
        "both versions of this run start from it",
        f"evenpipe: --load {tmp_path}/2bw/iter_0000003: the checkpoint has two versions of the weights: "
        "this run goes on from the newer one",
    ]


@pytest.mark.parametrize("name", ["pp2, fp16", "pp2, 2bw, fp16"])
def test_the_loss_scale_is_gone_on_with(name: str, resumed: dict[str, tuple[object, ...]]) -> None:
    whole, rest = resumed[name]
    assert whole.skipped_iterations[0] == 0
    assert rest.skipped_iterations == tuple(number for number in whole.skipped_iterations if number >= 4)


def test_what_was_tuned_is_gone_on_with(resumed: dict[str, tuple[object, ...]]) -> None:
    whole, rest = resumed["pp2, kfkb, auto"]
    assert [retune.iteration for retune in whole.retunes] == [0, 3]
    assert rest.retunes == (), "the next decision is due before iteration 6, as in the run that was saved"


def goes_on_exactly(folder: Path) -> None:
    """Two more iterations from the latest checkpoint in `folder` are as in a run that was never stopped."""
    behind = find(folder).iterations
    shape = {**TINY, "iterations": behind + 2}
    whole, rest = run_cases([TrainOptions.of(**shape), TrainOptions.of(**shape, load=str(folder))])
    assert (rest.first_iteration, len(rest.losses)) == (behind, 2)
    assert rest.losses == whole.losses[behind:]
    assert rest.weights_sha256 == whole.weights_sha256


def test_sigterm_saves_after_the_same_iteration_everywhere(run: Callable[..., Run], tmp_path: Path) -> None:
    running = run(save=str(tmp_path))
    os.kill(running.process.pid, signal.SIGTERM)
    status, line = running.ending()
    saved = find(tmp_path)
    assert line == f"evenpipe train: stopped by SIGTERM: saved {saved.folder}: go on with --load {tmp_path}"
    assert status == 128 + signal.SIGTERM
    goes_on_exactly(tmp_path)


def test_sigterm_to_all_processes_at_once_does_too(run: Callable[..., Run], tmp_path: Path) -> None:
    running = run(save=str(tmp_path))
    os.killpg(running.process.pid, signal.SIGTERM)
    status, line = running.ending()
    assert f"saved {find(tmp_path).folder}" in line
    assert status == 128 + signal.SIGTERM


def test_killed_at_any_moment_a_run_goes_on_from_its_latest_checkpoint(run: Callable[..., Run], tmp_path: Path) -> None:
    moments = random.Random(7)
    behind = 0
    for _ in range(2):
        load = {"load": str(tmp_path)} if behind else {}
        running = run(save=str(tmp_path), save_interval="1", **load)
        while not (tmp_path / "latest").exists():
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.3))
        os.killpg(running.process.pid, signal.SIGKILL)
        assert running.ending()[0] == -signal.SIGKILL
        assert find(tmp_path).iterations >= max(behind, 1)
        behind = find(tmp_path).iterations
    goes_on_exactly(tmp_path)


@pytest.fixture
def little_room(tmp_path: Path) -> Iterator[Path]:
    """A folder with room for one checkpoint, but not for two."""
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", tmp_path], capture_output=True)
    if mount.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(run: Callable[..., Run], little_room: Path) -> None:
    status, line = run(save=str(little_room), save_interval="2").ending()
    assert re.fullmatch(
        rf"evenpipe train: stage \d failed at saving: NotSaved: --save {little_room}: "
        rf"{little_room}/iter_0000004.partial/rank_0000\d.pt: No space left on device: make room, or save elsewhere",
        line,
    )
    assert status == 1
    assert sorted(path.name for path in little_room.iterdir()) == ["iter_0000002", "latest"]
    assert find(little_room).iterations == 2
