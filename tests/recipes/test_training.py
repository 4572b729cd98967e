"""Recipes for DeepSpeed train, on CPU, by the files that were emitted."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from evenpipe.descriptions import cluster
from evenpipe.recipes.files import files_of, write_files
from tests.ports import free_port
from tests.recipes.cluster import here, trained
from tests.recipes.tiny import bert, gpt, recipe_of

pytestmark = pytest.mark.gate

SHORT = {"train_iters": "3", "log_interval": "1", "lr": "3e-3"}
STARTED = {"torchrun": "train.sh", "deepspeed": "launch.sh", "slurm": "launch.sbatch"}


def written(folder: Path, launcher: str, **given: object) -> tuple[Path, int]:
    """A recipe in a folder, and on how many nodes it is."""
    settings = {**SHORT, "checkpoints": str(folder / "check points"), "master_port": str(free_port())}
    nodes = cluster("2x2-a100-80gb" if launcher == "slurm" else f"1x{given.get('stages', 4)}-a100-80gb")
    if launcher == "slurm":
        settings["interface"] = "lo"
    recipe = recipe_of("deepspeed", launcher, settings | given.pop("settings", {}), nodes, **given)
    write_files(folder / "recipe", files_of(recipe))
    return folder / "recipe", nodes.nodes


def losses(output: str) -> dict[int, float]:
    return {int(number): float(loss) for number, loss in re.findall(r"iteration (\d+)/\d+ \| loss ([\d.]+)", output)}


@pytest.mark.parametrize(
    ("launcher", "kind", "run"),
    [
        ("torchrun", gpt, {"bpipe": True}),
        ("deepspeed", bert, {"schedule": "kfkb", "group_size": 2, "stages": 2, "bpipe": False}),
        ("slurm", gpt, {"schedule": "2bw", "stages": 2, "bpipe": False}),
    ],
)
def test_the_emitted_files_train(launcher, kind, run, tmp_path):
    folder, nodes = written(tmp_path, launcher, of=kind(), settings={"data": "mock"}, **run)
    output = trained(["bash", STARTED[launcher]], folder, here(tmp_path, nodes, DS_ACCELERATOR="cpu"))
    found = losses(output)
    assert sorted(found) == [1, 2, 3]
    assert found[1] == pytest.approx(np.log(kind().vocabulary), rel=0.05), "random weights know nothing"
    assert "[evenpipe]" in output or "evenpipe: iteration" in output
    assert (tmp_path / "check points" / "latest").read_text() == "global_step3"


def test_a_run_goes_on_where_it_was_saved_and_learns_from_files(tmp_path):
    tokens = np.tile(np.arange(64, dtype=np.uint16), 200)
    tokens.tofile(tmp_path / "to kens.bin")
    settings = {"data": str(tmp_path / "to kens"), "train_iters": "6", "save_interval": "2"}
    folder, _ = written(tmp_path, "torchrun", settings=settings)
    environment = here(tmp_path, DS_ACCELERATOR="cpu")
    whole = losses(trained(["bash", "train.sh"], folder, environment))
    assert whole[6] < whole[1] - 1, "what comes next is plain to see"
    (tmp_path / "check points" / "latest").write_text("global_step4")
    again = losses(trained(["bash", "train.sh"], folder, environment))
    assert again == {5: whole[5], 6: whole[6]}
