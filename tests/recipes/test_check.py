"""`evenpipe recipe --check`: what a person has edited is read again, and what no longer fits is said, a line each."""

from __future__ import annotations

import json
import re

import pytest

from evenpipe.cli.main import main
from evenpipe.descriptions import cluster, model
from evenpipe.planner.run import Run
from evenpipe.recipes import Recipe, RecipeError, Settings
from evenpipe.recipes.files import files_of, write_files
from evenpipe.recipes.reading import UNKNOWN, read_script
from tests.recipes.tiny import TWO_NODES, bert, recipe_of

BPIPE = Run(128, tensor=4, stages=8, micro_batch=2, recompute="selective", bpipe=True)
FRAMEWORKS = [
    (framework, launcher)
    for framework in ("megatron", "deepspeed")
    for launcher in ("torchrun", "slurm", "deepspeed", "kubernetes")
]


def written(folder, launcher="torchrun", *settings, run=BPIPE):
    of, on = model("gpt3-96b"), cluster("4x8-a100-80gb")
    recipe = Recipe.of(of, on, run, "megatron", launcher, Settings.of(settings), of.framework)
    write_files(folder, files_of(recipe))
    return recipe


def checked(folder, capsys, *flags):
    status = main(["recipe", "--check", str(folder), *flags])
    return status, capsys.readouterr().out


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(("framework", "launcher"), FRAMEWORKS)
@pytest.mark.parametrize("kind", [None, bert])
def test_a_recipe_as_it_was_written_fits(framework, launcher, kind, tmp_path, capsys):
    recipe = recipe_of(framework, launcher, on=TWO_NODES, of=kind and kind(), layout=(1, 3, 2, 2))
    write_files(tmp_path / "recipe", files_of(recipe))
    status, said = checked(tmp_path / "recipe", capsys)
    assert status == 0, said
    assert f"{recipe.estimate.iteration_ms:,.0f} ms an iteration" in said


def test_the_estimate_is_that_of_the_recipe(tmp_path, capsys):
    recipe = written(tmp_path)
    _, said = checked(tmp_path, capsys)
    assert f"{recipe.estimate.iteration_ms:,.0f} ms an iteration, MFU {recipe.estimate.mfu:.1%}" in said
    assert "not given to Megatron-LM's own parser, which would execute its code" in said


def test_code_that_the_checked_files_name_is_not_executed(tmp_path, capsys):
    checkout, folder = tmp_path / "checkout", tmp_path / "recipe"
    (checkout / "megatron" / "training").mkdir(parents=True)
    executed = tmp_path / "executed"
    (checkout / "pretrain_gpt.py").write_text(f"open({str(executed)!r}, 'w')")
    folder.mkdir()
    written(folder)
    edit(folder / "train.sh", "MEGATRON_LM=/opt/Megatron-LM", f"MEGATRON_LM={checkout}")
    status, said = checked(folder, capsys)
    assert status == 0, said
    assert f"name a checkout that you trust with --megatron-lm, such as {checkout}" in said
    assert not executed.exists()


EDITED = [
    ("--micro-batch-size 2", "--micro-batch-size 8", "too few"),
    ("--recompute-granularity selective", "", "stage 0 needs"),
    ("--num-layers 80", "--num-layers 81", "81 layers do not divide by 8 parts"),
    ("--global-batch-size 128", "--global-batch-size 127", "--global-batch-size 127: is no multiple of 2"),
    ("--tensor-model-parallel-size 4", "--tensor-model-parallel-size 3", "into which 32 do not divide"),
    ("--pipeline-model-parallel-size 8", "--pipeline-model-parallel-size 16", "into which 32 do not divide"),
    ("--num-attention-heads 104", "--num-attention-heads 103", "--num-attention-heads 103"),
    ("--evenpipe-schedule 1f1b", "--evenpipe-schedule 1f2b", "--evenpipe-schedule"),
    ("--evenpipe-schedule 1f1b", "--evenpipe-schedule 1f1b --group-size 2", "only --evenpipe-schedule kfkb"),
    ("--evenpipe-schedule 1f1b --bpipe", "--evenpipe-schedule gpipe --bpipe", "nothing to level"),
    ("NODES=4", "NODES=2", "32 GPUs"),
    ("--global-batch-size 128", "--global-batch-size many", "--global-batch-size: 'many' is no whole number"),
    ("PARALLEL=(", "PARALLEL=((", ""),
    ("MEGATRON_LM=/opt/Megatron-LM", "MEGATRON_LM='/opt/Megatron-LM", "'"),
    ("-m evenpipe run ", "", "starts no `-m evenpipe run`"),
]


@pytest.mark.parametrize(("old", "new", "said"), EDITED)
def test_what_no_longer_fits_is_said_with_what_to_change(old, new, said, tmp_path, capsys):
    written(tmp_path)
    if old == "NODES=4":  # half of the GPUs: the flags have to change too
        said = "into which 16 do not divide"
    edit(tmp_path / "train.sh", old, new)
    status, printed = checked(tmp_path, capsys)
    assert status == 1, printed
    assert said in printed.splitlines()[0] + printed.splitlines()[-1], printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("Et*10|(t*10|)*6t*9L", "has 79 layers, --num-layers 80"),
        ("Et*10|(t*10|)*5t*20L", "has 7 parts"),
        ("t*10|(t*10|)*6t*10L", "begin the first part with E"),
        ("Ex*10|(t*10|)*6t*10L", "'x' is no layer"),
    ],
)
def test_a_layout_is_compared_with_layers_and_stages(layout, said, tmp_path, capsys):
    written(tmp_path)
    edit(tmp_path / "train.sh", "--num-layers 80", f"--num-layers 80 --pipeline-model-parallel-layout '{layout}'")
    status, printed = checked(tmp_path, capsys)
    assert status == 1
    assert said in printed


@pytest.mark.parametrize(
    ("launcher", "file", "old", "new"),
    [
        ("slurm", "launch.sbatch", "--nodes=4", "--nodes=5"),
        ("slurm", "launch.sbatch", "--gpus-per-node=8", "--gpus-per-node=4"),
        ("kubernetes", "job.yaml", "replicas: 3", "replicas: 2"),
        ("kubernetes", "job.yaml", 'nprocPerNode: "8"', 'nprocPerNode: "4"'),
    ],
)
def test_files_that_say_other_sizes_are_named(launcher, file, old, new, tmp_path, capsys):
    written(tmp_path, launcher)
    edit(tmp_path / file, old, new)
    status, printed = checked(tmp_path, capsys)
    assert status == 1
    assert file in printed
    assert "train.sh: NODES, GPUS_PER_NODE" in printed


@pytest.mark.parametrize(
    ("launcher", "file", "old", "new", "said"),
    [
        ("torchrun", "train.sh", "torchrun ", "torchrum ", "train.sh: torchrum: there is no such program: did you"),
        ("deepspeed", "launch.sh", "exec deepspeed", "exec deepsped", "launch.sh: deepsped: there is no such program"),
        ("slurm", "launch.sbatch", "ntasks-per-node=1", "ntasks-per-node=8", "launch.sbatch: --ntasks-per-node=8: "),
    ],
)
def test_what_would_not_start_is_named(launcher, file, old, new, said, tmp_path, capsys):
    written(tmp_path, launcher)
    edit(tmp_path / file, old, new)
    status, printed = checked(tmp_path, capsys)
    assert status == 1
    assert said in printed
    assert "fits" not in printed


@pytest.mark.parametrize(
    ("launcher", "file", "old", "new", "said"),
    [
        ("torchrun", "train.sh", "torchrun ", "my-starter ", "note: train.sh: my-starter: starts the run: not looked"),
        ("slurm", "launch.sbatch", "#SBATCH --exclusive", "#SBATCH --mem=1", "note: launch.sbatch: --mem: not looked"),
        ("kubernetes", "job.yaml", '"/recipe/train.sh"', '"/other.sh"', "note: job.yaml: command ['bash', '/other"),
        ("torchrun", "train.sh", "--override-opt_param-scheduler", "", "note: train.sh: Megatron-LM refuses to"),
    ],
)
def test_what_is_not_judged_of_a_start_is_noted(launcher, file, old, new, said, tmp_path, capsys):
    written(tmp_path, launcher)
    edit(tmp_path / file, old, new)
    status, printed = checked(tmp_path, capsys)
    assert status == 0, printed
    assert said in printed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"train_batch_size": 7}, "train_batch_size 7: is not 1 × 8 × 1"),
        ({"train_micro_batch_size_per_gpu": "a"}, "no whole number above 0"),
        ({"evenpipe": {"schedule": "interleaved"}}, "interleaved"),
        ({"evenpipe": {"schedul": "1f1b"}}, "did you mean schedule?"),
        ({"evenpipe": {"schedule": "1f1b", "partition": [0, 3, 6, 12]}}, "3 stages for --stages 4"),
        ({"evenpipe": {"schedule": "1f1b", "partition": [0, 3, 6, 8, 11]}}, "go from 0 to 12"),
        ({"evenpipe": {"schedule": "1f1b", "partition": [0, 1, 6, 8, 12]}}, "on one stage each"),
    ],
)
def test_deepspeed_s_configuration_is_compared_with_the_flags(change, said, tmp_path, capsys):
    write_files(tmp_path / "recipe", files_of(recipe_of("deepspeed")))
    path = tmp_path / "recipe" / "ds_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    status, printed = checked(tmp_path / "recipe", capsys)
    assert status == 1
    assert said in printed


@pytest.mark.parametrize(
    ("launcher", "old", "new", "said"),
    [
        ("kubernetes", "replicas: 3", "replicas: many", "job.yaml: Worker: replicas: 'many' is no whole number"),
        ("kubernetes", "pytorchReplicaSpecs:", "pytorchReplicaSpecs: 3\n  x:", "spec.pytorchReplicaSpecs has no roles"),
        ("kubernetes", "spec:\n  nproc", "spec: [1]\nx:\n  nproc", "spec.pytorchReplicaSpecs has no roles"),
        (
            "kubernetes",
            'nvidia.com/gpu: "8"',
            'nvidia.com/gpu: "4"',
            "job.yaml: Master's nvidia.com/gpu: 4 GPUs a node",
        ),
        ("kubernetes", 'nvidia.com/gpu: "8"', 'nvidia.com/gpu: "x"', "nvidia.com/gpu: 'x' is no whole number"),
        ("deepspeed", "node1 slots=8", "node1 slots=x", "hostfile:2: 'node1 slots=x' is no host"),
        ("deepspeed", "node1 slots=8", "node1 slots=4", "hostfile: give hosts, all with the same slots"),
        ("deepspeed", "node1 slots=8", "node0 slots=8", "hostfile:2: node0 is there twice"),
    ],
)
def test_a_job_and_a_hostfile_that_would_not_start_are_said(launcher, old, new, said, tmp_path, capsys):
    written(tmp_path, launcher)
    edit(tmp_path / {"kubernetes": "job.yaml", "deepspeed": "hostfile"}[launcher], old, new)
    status, printed = checked(tmp_path, capsys)
    assert status == 1
    assert said in printed


def test_a_job_without_files_is_one_line(tmp_path, capsys):
    written(tmp_path, "kubernetes")
    edit(tmp_path / "job.yaml", "\ndata:", "\ndata: [1]\nx:")
    with pytest.raises(SystemExit):
        main(["recipe", "--check", str(tmp_path)])
    assert "job.yaml: its ConfigMap has no train.sh" in capsys.readouterr().err


def test_no_stages_at_all_are_said(tmp_path, capsys):
    write_files(tmp_path / "recipe", files_of(recipe_of("deepspeed")))
    edit(tmp_path / "recipe" / "train.sh", "--stages 4", "--stages 0")
    status, printed = checked(tmp_path / "recipe", capsys)
    assert status == 1
    assert "train.sh: --stages 0: 4 GPUs do not divide into them" in printed


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "evenpipe.plan/1"}'])
def test_a_folder_that_is_no_recipe_is_one_line(text, tmp_path, capsys):
    (tmp_path / "recipe.json").write_text(text)
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(SystemExit) as end:
            main(["recipe", "--check", str(folder)])
        assert end.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_what_only_a_shell_knows_is_noted(tmp_path, capsys):
    written(tmp_path)
    edit(tmp_path / "train.sh", "--seed 1234", '--seed "$(date +%s)"')
    status, printed = checked(tmp_path, capsys)
    assert status == 0, printed
    assert "note: --seed: is known only when it runs" in printed


def test_flags_that_only_megatron_knows_are_left_to_its_parser(tmp_path, capsys):
    written(tmp_path)
    edit(tmp_path / "train.sh", "--seed 1234", "--seed 1234 --rotary-scaling-factor 8")
    status, printed = checked(tmp_path, capsys)
    assert status == 0
    assert "note: --rotary-scaling-factor: for Megatron-LM's own parser to judge" in printed


SCRIPT = r"""
A=plain  # a comment
B='it'"'"'s $A' C="x\"$A\\"
export D=${E:-"a b"} F=${A}/f G=$(cmd) H=a\
b
LIST=(
    one --two="$B"  # three
    "${A}" 'f#ur'
)
if true; then echo "$LIST"; fi
exec launch -m evenpipe run "${LIST[@]}" $G "${NONE:?x}" | tee log
"""


def test_bash_is_read_as_it_would_be_run():
    found = read_script(SCRIPT, "train.sh")
    assert found.variables["B"] == "it's $A"
    assert found.arrays["LIST"] == ["one", "--two=it's $A", "plain", "f#ur"]
    assert found.command == [
        *("exec", "launch", "-m", "evenpipe", "run", "one", "--two=it's $A", "plain", "f#ur"),
        *(UNKNOWN, UNKNOWN),
    ]
    assert found.variables["D"] == "a b"


@pytest.mark.parametrize("text", ["A=${B:-" + 5000 * "${C}" + "}", 5000 * "${A:-" + 5000 * "}"], ids=["wide", "deep"])
def test_too_many_expansions_within_another_are_refused_in_a_line(text):
    with pytest.raises(RecipeError, match=r"^train\.sh: has too many \$\{\.\.\.\} within another"):
        read_script(f"A={text}\nevenpipe run\n", "train.sh")


@pytest.mark.parametrize("text", ["A='x", 'A="x', "A=(x", "A=$(x", "A=${x", "A=`x", "echo evenpipe", ""])
def test_what_is_not_closed_is_named_by_its_line(text):
    with pytest.raises(RecipeError, match=r"train\.sh"):
        read_script(text, "train.sh")


def test_every_line_is_one_line(tmp_path, capsys):
    written(tmp_path)
    edit(tmp_path / "train.sh", "--num-layers 80", "--num-layers 79")
    _, printed = checked(tmp_path, capsys)
    assert all(re.match(r"\S", line) for line in printed.splitlines())
