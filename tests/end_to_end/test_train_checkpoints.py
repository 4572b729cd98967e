"""Runs that are stopped and gone on with: nothing is lost, and no bit differs."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from evenpipe.train.checkpoint import find
from evenpipe.train.launch import run_cases
from evenpipe.train.options import TrainOptions
from tests.end_to_end.running import Ending, Run
from tests.selected import marked, selected

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds a session's processes in /proc")

TINY = {"stages": 2, "layers": 2, "hidden": 16, "heads": 2, "seq_length": 16, "micro_batches": 4}
SMALL = {"hidden": 16, "heads": 2, "seq_length": 16, "micro_batches": 4, "stages": 2, "iterations": 6}
# Neighbours of as many processes share them.
SETTINGS = {
    "pp2, dropout": {"dropout": 0.1, "lr_decay": "cosine", "lr_warmup": 4},
    "pp2, momentum": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "model": "bert", "engine": "megatron"},
    "pp2, fp16": {"precision": "fp16", "initial_loss_scale": 2.0**22, "schedule": "interleaved", "chunks": 2},
    "pp2, 2bw": {"schedule": "2bw", "dropout": 0.1, "lr_decay": "cosine", "bpipe": True},
    "pp2, 2bw, fp16": {"schedule": "2bw", "precision": "fp16", "initial_loss_scale": 2.0**22, "clip_grad": 0.1},
    "pp2, 2bw, unclipped": {"schedule": "2bw", "optimizer": "sgd", "momentum": 0.9, "clip_grad": 0.0},
    "pp2, kfkb, auto": {
        "schedule": "kfkb",
        "group_size": "auto",
        "retune_interval": 3,
        "memory_gib": 1.0,
        "micro_batch_size": 2,
        "dropout": 0.1,
    },
    "dp2 pp2, 2bw, bf16": {
        "schedule": "2bw",
        "data_parallel": 2,
        "distributed_optimizer": True,
        "precision": "bf16",
        "dropout": 0.1,
    },
    "dp2 pp2, bf16": {"data_parallel": 2, "distributed_optimizer": True, "precision": "bf16", "dropout": 0.1},
    "dp2 pp2": {"data_parallel": 2, "distributed_optimizer": True, "bpipe": True},
    "pp4, 2bw, bpipe": {"schedule": "2bw", "bpipe": True, "stages": 4, "layers": 4, "micro_batches": 5},
}
LONG = {"pp2, 2bw, unclipped", "dp2 pp2, bf16", "pp2, momentum"}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, tuple[object, ...]]:
    """Of every setting that is looked at a run that saved on its way, and one that went on from there."""
    names = selected(request, "name", others=SETTINGS.keys() - LONG)
    asked = [name for name in SETTINGS if name in names]
    cases = []
    for name in asked:
        folder = str(tmp_path_factory.mktemp("run"))
        options = {**SMALL, "layers": 4, **SETTINGS[name]}
        cases.append(TrainOptions.of(**options, save=folder, save_interval=4))
        cases.append(TrainOptions.of(**options, load=f"{folder}/iter_0000004"))
    results = iter(run_cases(cases))
    return dict(zip(asked, zip(results, results, strict=True), strict=True))


@pytest.mark.parametrize("name", marked(SETTINGS, LONG))
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


def told_to_end(folder: Path, tell: Callable[[Run], None]) -> Ending:
    with Run(save=str(folder)) as run:
        tell(run)
        return run.ending()


STOPPED: dict[str, Callable[[Path], Any]] = {
    "terminated": lambda folder: told_to_end(folder, lambda run: os.kill(run.process.pid, signal.SIGTERM)),
    "interrupted": lambda folder: told_to_end(folder, lambda run: os.kill(run.process.pid, signal.SIGINT)),
    "hung up": lambda folder: told_to_end(folder, lambda run: os.killpg(run.process.pid, signal.SIGHUP)),
}


class Stopped(NamedTuple):
    """What one of STOPPED found, and the folder of its checkpoints."""

    found: Future[Any]
    folder: Path


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[dict[str, Stopped]]:
    """Runs of STOPPED. A few are under way at a time: they mostly import and wait."""
    names = selected(request, "name", others=STOPPED.keys() - {"interrupted", "hung up"})
    folders = {name: tmp_path_factory.mktemp("stopped") for name in STOPPED if name in names}
    with ThreadPoolExecutor(3) as pool:
        yield {name: Stopped(pool.submit(STOPPED[name], folder), folder) for name, folder in folders.items()}


@pytest.mark.long
def test_sigterm_saves_after_the_same_iteration_everywhere(stopped: dict[str, Stopped]) -> None:
    ending, folder = stopped["terminated"]
    status, line = ending.result()
    saved = find(folder)
    assert line == f"evenpipe train: stopped by SIGTERM: saved {saved.folder}: go on with --load {folder}"
    assert status == 128 + signal.SIGTERM
    goes_on_exactly(folder)


@pytest.mark.parametrize(
    ("name", "number"),
    [("interrupted", signal.SIGINT), pytest.param("hung up", signal.SIGHUP, marks=pytest.mark.long)],
)
def test_sigint_and_sighup_save_too(name: str, number: signal.Signals, stopped: dict[str, Stopped]) -> None:
    ending, folder = stopped[name]
    status, line = ending.result()
    assert f": stopped by {number.name}: saved " in line
    saved = find(folder)
    assert line == f"evenpipe train: stopped by {number.name}: saved {saved.folder}: go on with --load {folder}"
    assert status == 128 + number
