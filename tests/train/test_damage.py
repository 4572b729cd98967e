"""Flipped bytes anywhere in a checkpoint: it is refused in one line, or what is used is what was saved."""

import hashlib
import io
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from evenpipe.train.checkpoint import FORMAT, Draft, FileEntry, find, rank_file
from evenpipe.train.options import OptionsError, TrainOptions
from evenpipe.train.ownership import owned
from evenpipe.train.saver import state_of

RUN = "1" * 32
OPTIONS = TrainOptions.of(iterations=100, stages=2, layers=2)
PLACES = 200


def contents(rank: int, iteration: int, /, **changed: Any) -> bytes:
    file = io.BytesIO()
    identity = {"format": FORMAT, "run": RUN, "iteration": iteration, "rank": rank}
    torch.save({**identity, "state": {"weight": torch.full((40, 40), 1.0 * rank + iteration)}} | changed, file)
    return file.getvalue()


def used(folder: Path) -> tuple[int, dict[str, object], list[float]]:
    checkpoint = find(folder)
    weights = [state_of(checkpoint, rank)["weight"] for rank in range(2)]
    return checkpoint.iterations, checkpoint.manifest.options, [weight.double().sum().item() for weight in weights]


@pytest.mark.parametrize("name", ["latest", "iter_0000005/checkpoint.json", "iter_0000005/rank_00001.pt"])
def test_flips_at_200_places_are_never_used(name: str, tmp_path: Path) -> None:
    for iteration in (4, 5):  # one older, that nobody has asked for
        save_as(RUN, tmp_path, iteration, [contents(rank, iteration) for rank in range(2)])
    path, places, good = tmp_path / name, random.Random(3), used(tmp_path)
    whole, lines = path.read_bytes(), []
    for _ in range(PLACES):
        damaged = bytearray(whole)
        for _ in range(places.choice((1, 1, 4))):
            damaged[places.randrange(len(whole))] ^= 1 << places.randrange(8)
        path.write_bytes(damaged)
        try:
            assert used(tmp_path) == good
        except OptionsError as error:
            lines.append(str(error))
    assert len(lines) > PLACES * 0.6, "of a manifest blanks may change"
    assert all(line.startswith(f"--load {tmp_path}") and "\n" not in line for line in lines)
    path.write_bytes(whole)
    assert used(tmp_path) == good


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rank": 0}, "it is of rank 0, not 1"),
        ({"iteration": 4}, "it is of iteration 4, not 5"),
        ({"run": "2" * 32}, f"it is of run {'2' * 32}, not {RUN}"),
        ({"state": 3}, "it holds no state of a run"),
    ],
)
def test_a_file_of_another_rank_iteration_or_run_is_refused(
    changed: dict[str, object], said: str, tmp_path: Path
) -> None:
    save_as(RUN, tmp_path, 5, [contents(0, 5), contents(1, 5, **changed)])
    with pytest.raises(OptionsError) as refusal:
        used(tmp_path)
    assert str(refusal.value).endswith(f"rank_00001.pt: the checkpoint is damaged ({said}): name another")


@pytest.mark.parametrize("content", [b"", b"junk", b"\x80\x04", contents(1, 5)[:-300], b"(d\x85"])
def test_whatever_loading_raises_is_one_line(content: bytes, tmp_path: Path) -> None:
    save_as(RUN, tmp_path, 5, [contents(0, 5), content])
    with pytest.raises(OptionsError) as refusal:
        used(tmp_path)
    line = str(refusal.value)
    assert "rank_00001.pt: the checkpoint is damaged (torch.load cannot read it, " in line
    assert "\n" not in line
    assert "weights_only" not in line


def save_as(run: str, folder: Path, iteration: int, files: list[bytes]) -> None:
    draft = Draft(folder, iteration, run)
    draft.begin()
    entries = {}
    for rank, content in enumerate(files):
        draft.write(rank_file(rank), lambda file, content=content: file.write(content))
        entries[rank_file(rank)] = FileEntry(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    draft.complete(OPTIONS, entries)


def saves(folder: Path, run: str, first: int, last: int) -> None:
    """A job that saves iterations `first` to `last` - 1."""
    with owned(folder, run, lambda line: None, patience=1):
        for iteration in range(first, last):
            save_as(run, folder, iteration, [contents(rank, iteration, run=run) for rank in range(2)])


def latest(folder: Path) -> str:
    path = folder / "latest"
    return path.read_text() if path.exists() else ""


def all_are_whole(folder: Path) -> None:
    for path in folder.glob("iter_???????"):
        used(path)
    used(folder)


@pytest.mark.gate
def test_of_fifty_kills_while_saving_none_loses_or_mixes_anything(tmp_path: Path) -> None:
    moments, behind, folder = random.Random(11), 0, tmp_path / "saved"
    folder.mkdir()
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload([__name__])
    for kill in range(50):
        job = forking.Process(target=saves, args=(folder, f"{kill + 1:032x}", behind + 1, behind + 1000))
        job.start()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and latest(folder)[5:12] <= f"{behind:07d}":
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.1))
        job.kill()
        job.join()
        all_are_whole(folder)
        now, _, _ = used(folder)
        assert now > behind, "what was complete is lost, or nothing was saved"
        behind = now
