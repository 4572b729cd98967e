"""Recipes for Megatron-LM: its own parser takes the flags of every one, and the emitted files train."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from evenpipe.cli.main import main
from evenpipe.descriptions import cluster, model
from evenpipe.planner.run import Run
from evenpipe.recipes import Recipe, Settings
from evenpipe.recipes.files import files_of, write_files
from tests.megatron_lm.launch import BYTECODE, launch
from tests.megatron_lm.launch import Run as Job
from tests.ports import free_port
from tests.recipes.cluster import here, trained
from tests.recipes.tiny import argv_of, bert, gpt, recipe_of, starter

#: What flags there are of: models, precisions, schedules, divisions.
RUNS = {
    "bpipe": (
        "gpt3-96b",
        "4x8-a100-80gb",
        Run(128, tensor=4, stages=8, micro_batch=2, recompute="selective", bpipe=True),
    ),
    "groups": (
        "gpt3-175b",
        "8x8-a100-80gb",
        Run(64, tensor=8, stages=8, schedule="kfkb", group_size=2, recompute="full"),
    ),
    "2bw": ("gpt2-2.2b", "1x8-v100-16gb", Run(64, stages=8, micro_batch=4, schedule="2bw", recompute="full")),
    "layout": (
        "llama3-70b",
        "8x8-h100",
        Run(128, tensor=4, stages=8, data=2, layout=(9, 10, 10, 11, 10, 10, 10, 10), recompute="full"),
    ),
    "virtual": ("llama3-8b", "1x8-h100", Run(64, tensor=2, stages=2, data=2, chunks=4, schedule="interleaved")),
    "virtual layout": (
        "llama3-8b",
        "1x8-h100",
        Run(64, tensor=2, stages=4, chunks=2, schedule="interleaved", layout=(3, 4, 4, 5, 4, 4, 4, 4)),
    ),
    "pipeline in a node": ("llama3-8b", "2x8-h100", Run(64, stages=8, data=2, placement="pipeline")),
    "experts": ("mixtral-8x7b", "4x8-h100", Run(64, stages=4, data=8, expert=8)),
    "latent": ("deepseek-v3", "16x8-h100", Run(256, stages=4, data=32, expert=32, layout=(15, 15, 15, 16))),
    "bert": ("bert-large", "1x8-v100-16gb", Run(64, stages=4, data=2, micro_batch=4)),
}


def recipe(name: str, release: str) -> Recipe:
    of, on, run = RUNS[name]
    described = model(of)
    data = [] if described.causal is False else ["data=mock"]
    settings = Settings.of([*data, f"release={release}", "megatron_lm=checkout"])
    return Recipe.of(described, cluster(on), run, "megatron", "torchrun", settings, described.framework)


@pytest.mark.every_release
@pytest.mark.parametrize("name", RUNS)
def test_its_own_parser_takes_the_flags_and_the_estimate_is_the_readme_s(megatron_lm, name, tmp_path):
    """`evenpipe run --estimate` goes through Megatron's parser and validate_args, and no further."""
    of = recipe(name, megatron_lm.name.rpartition(".")[0])
    write_files(tmp_path / "recipe", files_of(of))
    environment = {**starter(tmp_path, "torchrun"), "MASTER_ADDR": "first", "NODE_RANK": "0"}
    argv = argv_of(["bash", str(tmp_path / "recipe" / "train.sh")], environment)
    script = argv.index(f"checkout/pretrain_{of.kind}.py")
    # The tokenizer, which would say it, is not there.
    flags = [*argv[script + 1 :], "--vocab-size", str(of.model.vocabulary - (of.kind == "gpt"))]
    options = ["--estimate", "--cluster", of.cluster.name, "--json"]
    # By its whole path: ranks of a script that is named alone come from a process that CPU mode is in already.
    script = str(megatron_lm / f"pretrain_{of.kind}.py")
    found = json.loads(launch(megatron_lm, script, 1, flags, options=options).output)
    # Megatron pads the vocabulary to a multiple of 128 × tensor parallelism.
    assert found["iteration_ms"] == pytest.approx(of.estimate.iteration_ms, rel=1e-4)
    # train.sh exports the allocator's option; these processes have none.
    without = of.estimator(replace(of.run, expandable_segments=False))
    for stage, same in zip(found["stages"], without.stages, strict=True):
        assert stage["bytes"]["total"] == pytest.approx(same.bytes.total, rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "status"), [("", 0), ("--no-such-flag 3", 1), ("--num-query-groups 7 --group-query-attention", 1)]
)
def test_a_check_asks_the_checkout_s_own_parser(megatron_lm, flags, status, tmp_path, capsys):
    write_files(tmp_path, files_of(recipe("bpipe", megatron_lm.name.rpartition(".")[0])))
    script = tmp_path / "train.sh"
    script.write_text(script.read_text().replace("--seed 1234", f"--seed 1234 {flags}"))
    assert main(["recipe", "--check", str(tmp_path), "--megatron-lm", str(megatron_lm)]) == status
    said = " ".join(capsys.readouterr().out.split())  # lines end where the terminal does
    assert "not given to" not in said
    if flags.startswith("--no"):
        assert f"{megatron_lm}/pretrain_gpt.py: unrecognized arguments: --no-such-flag 3" in said


def with_megatron(folder: Path, checkout: Path, nodes: int = 1) -> dict[str, str]:
    """Where emitted files find it; what is compiled of it is kept elsewhere, for other processes."""
    environment = here(folder, nodes, EVENPIPE_CPU="1", PYTHONPYCACHEPREFIX=str(BYTECODE))
    del environment["PYTHONDONTWRITEBYTECODE"]
    environment["PYTHONPATH"] = os.pathsep.join((str(checkout), environment["PYTHONPATH"]))
    return environment


SHORT = {"train_iters": "3", "log_interval": "1", "eval_iters": "1", "lr": "1e-3"}
STARTED = {"torchrun": "train.sh", "deepspeed": "launch.sh", "slurm": "launch.sbatch"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "on", "kind", "run"),
    [
        ("torchrun", "1x4-a100-80gb", gpt, {"bpipe": True, "layout": (1, 3, 2, 2)}),
        ("slurm", "2x1-a100-80gb", bert, {"schedule": "kfkb", "group_size": 2, "bpipe": False, "stages": 2}),
        ("deepspeed", "1x2-a100-80gb", gpt, {"schedule": "2bw", "bpipe": False, "stages": 2}),
    ],
)
def test_the_emitted_files_train(megatron_lm, launcher, on, kind, run, tmp_path, request):
    """In few processes: nearly all of the time is imports, of each process and of what it starts to save."""
    settings = {**SHORT, "checkpoints": str(tmp_path / "check points"), "megatron_lm": str(megatron_lm), "data": "mock"}
    settings |= {"master_port": str(free_port()), "release": megatron_lm.name.rpartition(".")[0]}
    if kind is bert:
        found = request.getfixturevalue("bert_data")
        settings |= {"data": found[1], "tokenizer": found[3]}
    nodes = cluster(on)
    if nodes.nodes > 1:
        settings["interface"] = "lo"
    of = recipe_of("megatron", launcher, settings, nodes, kind(), **run)
    write_files(tmp_path / "recipe", files_of(of))
    environment = with_megatron(tmp_path, megatron_lm, nodes.nodes)
    job = Job(0, trained(["bash", STARTED[launcher]], tmp_path / "recipe", environment))
    assert len(job.lines) == 3, job.output[-3000:]
    assert "[evenpipe]" in job.output
    if of.run.bpipe:
        assert max(job.peak_live) == 3 * of.run.group_size, "no stage holds more than ⌈(4 + 2) / 2⌉ groups"
    assert (tmp_path / "check points" / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert Path(tmp_path / "check points" / "iter_0000003").is_dir()
