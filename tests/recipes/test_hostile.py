"""Whatever characters a name or a path has, it arrives as it is: the files are run, and what they start is asked."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from evenpipe.recipes import RecipeError
from evenpipe.recipes.files import files_of, write_files
from tests.recipes.sbatch import directives
from tests.recipes.tiny import TWO_NODES, argv_of, bert, gpt, recipe_of, starter

_FRAGMENTS = (
    *("'", '"', "`touch owned`", "$(touch owned)", "${HOME}", "$HOME", "\n", "\r", " ", "\t", "-", "--save", "\\", ";"),
    *(
        "#",
        "{{ 7 }}",
        "{% raw %}",
        "|",
        "&",
        ">",
        "<",
        "*",
        "~",
        "!",
        "=",
        ",",
        ":",
        "}",
        ")",
        "(",
        "\x85",
        "\u2028",
        "é",
    ),
    *("\U0001f600", "\x07", "\x1b[31m", "%n", "$(VAR)", "...", "---", "- x", "EOF", "\\n", "\ufeff", "a/b"),
)
TEXT = (
    st.lists(
        st.one_of(
            st.sampled_from(_FRAGMENTS), st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=4)
        ),
        min_size=1,
        max_size=6,
    )
    .map("".join)
    .filter(bool)
)
WORST = "-x'\"$(touch owned)`touch owned`\n#\\é {{ 7 }}"
FEW = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
        assert not list(Path(name).rglob("owned")), "something was carried out"


def _is_path(text: str) -> str:
    """As a name of a folder, of which a path is made."""
    return text.replace("/", "_")[:40] + "_"


@FEW
@given(data=TEXT, tokenizer=TEXT, checkpoints=TEXT, megatron_lm=TEXT, interface=TEXT, model=TEXT, where=TEXT)
@example(WORST, WORST, WORST, WORST, WORST, WORST, WORST)
@example("d", "t", "c", "m", "i", "name\ntouch owned\n", "w")
def test_torchrun_gets_every_path_literally(data, tokenizer, checkpoints, megatron_lm, interface, model, where):
    given_values = {"data": f"{data}.", "tokenizer": tokenizer, "checkpoints": checkpoints}
    given_values |= {"megatron_lm": megatron_lm, "interface": interface}
    recipe = recipe_of("megatron", "torchrun", given_values, TWO_NODES, gpt(model))
    with folder() as here:
        out = here / _is_path(where)
        write_files(out, files_of(recipe))
        environment = {**starter(here, "torchrun"), "MASTER_ADDR": WORST, "NODE_RANK": "1"}
        argv = argv_of(["bash", str(out / "train.sh")], environment, cwd=here)
        assert argv[argv.index("--master-addr") + 1] == WORST
        expected = f"./{megatron_lm}" if megatron_lm.startswith("-") else megatron_lm
        assert argv[argv.index("run") + 1] == f"{expected}/pretrain_gpt.py"
        for flag, value in (("data-path", f"{data}."), ("tokenizer-model", tokenizer), ("load", checkpoints)):
            assert f"--{flag}={value}" in argv
        assert f"--save={checkpoints}" in argv


@FEW
@given(data=TEXT, checkpoints=TEXT, where=TEXT)
@example(WORST, WORST, WORST)
@pytest.mark.parametrize("kind", [gpt, bert])
def test_a_process_of_deepspeed_s_launcher_gets_them_literally(kind, data, checkpoints, where):
    recipe = recipe_of("deepspeed", "deepspeed", {"data": f"{data}.", "checkpoints": checkpoints}, of=kind())
    with folder() as here:
        out = here / _is_path(where)
        write_files(out, files_of(recipe))
        launched = argv_of(["bash", str(out / "launch.sh")], starter(here, "deepspeed"), cwd=here)
        assert launched[-2:] == ["bash", "train.sh"]
        argv = argv_of(["bash", "train.sh"], starter(here, "python"), cwd=out)
        assert argv[:6] == ["-u", "-m", "evenpipe", "run", "--deepspeed", "train.py"]
        assert f"--data={data}." in argv
        assert f"--checkpoints={checkpoints}" in argv


@FEW
@given(name=TEXT, partition=TEXT, account=TEXT, data=TEXT, model=TEXT)
@example(WORST, "p", "a", WORST, WORST)
@example("plain", "a b'\"\\#é", "$(touch owned)", WORST, WORST)
def test_slurm_is_told_names_literally_or_they_are_refused(name, partition, account, data, model):
    recipe = recipe_of(
        "megatron",
        "slurm",
        {"name": name, "partition": partition, "account": account, "data": f"{data}."},
        TWO_NODES,
        gpt(model),
    )
    control = [value for value in (name, partition, account) if any(c in value for c in _CONTROLS)]
    if control:
        with pytest.raises(RecipeError, match="control characters"):
            files_of(recipe)
        return
    files = files_of(recipe)
    told = directives(files["launch.sbatch"])
    assert told["job-name"] == name
    assert (told["partition"], told["account"], told["nodes"]) == (partition, account, "2")
    with folder() as here:
        write_files(here / "recipe", files)
        environment = {**starter(here, "srun", "torchrun"), "SLURM_JOB_ID": "7", "SLURM_NODEID": "1"}
        (here / "bin" / "scontrol").write_text("#!/bin/sh\necho first\nseq 100000\n")
        (here / "bin" / "scontrol").chmod(0o755)
        environment |= {"SLURM_JOB_NODELIST": "n[0-1]", "SLURM_SUBMIT_DIR": str(here / "recipe")}
        step = argv_of(["bash", "launch.sbatch"], environment, cwd=here / "recipe")
        assert step[-2:] == ["bash", "train.sh"]
        environment |= {"MASTER_ADDR": "first", "MASTER_PORT": "20007"}
        assert f"--data-path={data}." in argv_of(step[-2:], environment, cwd=here / "recipe")


_CONTROLS = "".join(map(chr, (*range(32), *range(127, 160), 0x2028, 0x2029)))


@FEW
@given(data=TEXT, checkpoints=TEXT, image=TEXT, mount=TEXT, model=TEXT)
@example(WORST, WORST, WORST, "x", WORST)
@example(" \n", "\n\n", "\x85", "\u2028", "a\n---\nkind: Secret")
def test_pods_get_them_literally(data, checkpoints, image, mount, model):
    told = {"data": f"{data}.", "checkpoints": checkpoints, "image": image, "mount": f"/{mount}"}
    files = files_of(recipe_of("megatron", "kubernetes", told, TWO_NODES, gpt(model)))
    configuration, job = yaml.safe_load_all(files["job.yaml"])
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert pod["containers"][0]["image"] == image
    assert f"/{mount}" in [one["mountPath"] for one in pod["containers"][0]["volumeMounts"]]
    with folder() as here:
        (here / "train.sh").write_text(configuration["data"]["train.sh"], newline="")
        environment = {**starter(here, "torchrun"), "MASTER_ADDR": "first", "MASTER_PORT": "1", "RANK": "1"}
        argv = argv_of(["bash", "train.sh"], environment, cwd=here)
        assert f"--data-path={data}." in argv
        assert f"--save={checkpoints}" in argv


@FEW
@given(name=TEXT, model=TEXT)
@example(WORST, WORST)
def test_a_readme_has_the_same_lines_whatever_the_names_are(name, model):
    plain = files_of(recipe_of(settings={"name": "a"}, of=gpt("b")))["README.md"].split("\n")
    lines = files_of(recipe_of(settings={"name": name}, of=gpt(model)))["README.md"].split("\n")
    assert len(lines) == len(plain)
    assert lines[4:] == plain[4:]
    assert lines[0].startswith("# ")


@pytest.mark.parametrize("value", ["a\0b", "\udcff"])
def test_what_no_file_can_hold_is_refused(value):
    with pytest.raises(RecipeError, match=r"--set data=.*choose another"):
        recipe_of(settings={"data": value})
