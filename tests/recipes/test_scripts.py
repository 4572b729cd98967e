"""Scripts are bash that shellcheck has nothing to say of, and hand on what they were told to."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from evenpipe.recipes.files import files_of, write_files
from tests.recipes.tiny import FOUR_GPUS, TWO_NODES, argv_of, bert, gpt, recipe_of, starter

FRAMEWORKS = ("megatron", "deepspeed")


def test_bash_and_shellcheck_take_every_script(tmp_path):
    """The scripts of all recipes, each text once: they name their folder, so that a complaint says which it is."""
    scripts = {}
    launchers = ("torchrun", "slurm", "deepspeed", "kubernetes")
    for framework, launcher, nodes, kind in product(FRAMEWORKS, launchers, (FOUR_GPUS, TWO_NODES), (gpt, bert)):
        recipe = recipe_of(framework, launcher, {"interface": "ib0", "account": "me"}, nodes, kind())
        files = files_of(recipe) if launcher != "kubernetes" else {"train.sh": _train_sh(recipe)}
        found = {name: text for name, text in files.items() if text.startswith("#!")}
        assert found, recipe
        for name, text in found.items():
            scripts.setdefault(text, tmp_path / f"{framework} {launcher} {kind.__name__} {len(scripts)} {name}")
    assert len(scripts) > 20
    for text, path in scripts.items():
        path.write_text(text)
        subprocess.run(["bash", "-n", path], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, "--severity=style", *scripts.values()], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def _train_sh(recipe):
    import yaml

    return next(iter(yaml.safe_load_all(files_of(recipe)["job.yaml"])))["data"]["train.sh"]


def test_torchrun_is_given_the_nodes_and_the_script_its_flags(tmp_path):
    recipe = recipe_of("megatron", "torchrun", {"megatron_lm": "/opt/m"}, TWO_NODES)
    write_files(tmp_path / "recipe", files_of(recipe))
    given = {**starter(tmp_path, "torchrun"), "MASTER_ADDR": "first", "NODE_RANK": "1"}
    argv = argv_of(["bash", str(tmp_path / "recipe" / "train.sh")], given)
    launch, module, script, flags = argv[:10], argv[10:13], argv[13], argv[14:]
    assert launch == [
        *("--nnodes", "2", "--nproc-per-node", "4", "--node-rank", "1"),
        *("--master-addr", "first", "--master-port", "29500"),
    ]
    assert module == ["-m", "evenpipe", "run"]
    assert script == "/opt/m/pretrain_gpt.py"
    assert flags[flags.index("--pipeline-model-parallel-size") + 1] == "4"
    assert "--bpipe" in flags


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "NODE_RANK"])
def test_a_node_that_is_not_told_where_it_is_starts_nothing(missing, tmp_path):
    write_files(tmp_path / "recipe", files_of(recipe_of(on=TWO_NODES)))
    given = {**starter(tmp_path, "torchrun"), "MASTER_ADDR": "first", "NODE_RANK": "1"}
    del given[missing]
    done = subprocess.run(["bash", tmp_path / "recipe" / "train.sh"], env=given, capture_output=True, text=True)
    assert done.returncode != 0
    assert missing in done.stderr
    assert not (tmp_path / "record").exists()


def test_deepspeed_s_launcher_is_given_the_nodes_and_nothing_of_the_run(tmp_path):
    """It hands what it is given to shells on other nodes, almost unquoted."""
    recipe = recipe_of("megatron", "deepspeed", {"hosts": "a,b.c", "master_port": "3000", "data": "$(x)"}, TWO_NODES)
    write_files(tmp_path / "recipe", files_of(recipe))
    assert (tmp_path / "recipe" / "hostfile").read_text() == "a slots=4\nb.c slots=4\n"
    argv = argv_of(["bash", "recipe/launch.sh"], starter(tmp_path, "deepspeed"), cwd=tmp_path)
    assert argv == [
        *("--hostfile", "hostfile", "--master_addr", "a", "--master_port", "3000"),
        *("--no_local_rank", "--no_python", "bash", "train.sh"),
    ]


def test_deepspeed_s_launcher_is_not_started_where_it_could_not_go(tmp_path):
    write_files(tmp_path / "a $(folder)", files_of(recipe_of("deepspeed", "deepspeed", on=TWO_NODES)))
    given = starter(tmp_path, "deepspeed")
    done = subprocess.run(["bash", tmp_path / "a $(folder)" / "launch.sh"], env=given, capture_output=True, text=True)
    assert done.returncode == 1
    assert "plain names" in done.stderr
    assert not (tmp_path / "record").exists()


def test_jobs_of_slurm_have_ports_of_their_own(tmp_path):
    write_files(tmp_path / "recipe", files_of(recipe_of("megatron", "slurm", on=TWO_NODES)))
    given = {**starter(tmp_path, "srun"), "SLURM_JOB_NODELIST": "n[0-1]"}
    for name, text in (
        ("scontrol", "printf 'first\\nsecond\\n'"),
        ("srun", 'printf "%s\\0" "$MASTER_ADDR" "$MASTER_PORT" > "$RECORD"'),
    ):
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    found = [
        argv_of(["bash", "recipe/launch.sbatch"], {**given, "SLURM_JOB_ID": job}, tmp_path) for job in ("1", "20002")
    ]
    assert found == [["first", "20001"], ["first", "20002"]]
