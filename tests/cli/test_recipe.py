"""`evenpipe recipe`: plans, writes, and refuses what does not exist with what to use instead."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from evenpipe.cli.formats import RecipeCheck
from evenpipe.cli.main import main
from evenpipe.descriptions import model
from evenpipe.planner.counted_flops import logged_flops
from evenpipe.planner.run import Run
from tests.refusals import refusal

SMALL = ["--model", "gpt2-355m", "--cluster", "1x8-v100-16gb", "--precision", "fp16"]
FEW = ["--global-batch-size", "32", "--schedule", "1f1b", "--stages", "4"]
MEGATRON = ["--framework", "megatron", "--launcher", "torchrun"]


def test_it_plans_and_writes_and_says_what_is_predicted(tmp_path, capsys):
    main(["recipe", "gpt", *SMALL, *FEW, *MEGATRON, "--out", str(tmp_path / "out"), "-s", "train_iters=7"])
    printed = capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"train.sh", "README.md", "recipe.json"}
    script = (tmp_path / "out" / "train.sh").read_text()
    assert "--pipeline-model-parallel-size 4" in script
    assert "--train-iters 7" in script
    ms = printed.split("takes ")[1].split(" ms")[0]
    told = (tmp_path / "out" / "README.md").read_text()
    assert f"takes **{ms} ms**" in told
    logged = float(told.split("logs that as `throughput per GPU (TFLOP/s/GPU): ")[1].split("`")[0])
    tokens = float(told.split(" tokens/s")[0].split()[-1].replace(",", "")) / 8
    of = model("gpt2-355m")
    assert logged == pytest.approx(logged_flops(of, Run(1)) / of.sequence * tokens / 1e12, abs=0.06)
    assert json.loads((tmp_path / "out" / "recipe.json").read_text())["format"] == "evenpipe.recipe/1"


def test_a_plan_is_carried_out_as_it_is(tmp_path, capsys):
    plan = tmp_path / "plan.json"
    main(["plan", *SMALL, *FEW, "--out", str(plan), "--framework", "megatron"])
    main(["recipe", "gpt", *SMALL[:4], *MEGATRON, "--plan", str(plan), "--out", str(tmp_path / "out")])
    best = json.loads(plan.read_text())["plans"][0]
    script = (tmp_path / "out" / "train.sh").read_text()
    assert f"--micro-batch-size {best['micro_batch_size']} --global-batch-size {best['global_batch_size']}" in script
    assert f"--tensor-model-parallel-size {best['tensor_parallel']}" in script
    assert "--fp16" in script, "precision that was asked of the plan"
    other = [*SMALL[:2], "--cluster", "2x8-v100-16gb", *MEGATRON]
    assert "is for --cluster 1x8-v100-16gb" in refusal(
        capsys, "recipe", "gpt", *other, "--plan", plan, "--out", tmp_path / "b"
    )
    shorter = [*SMALL[:4], "--seq-length", 256, *MEGATRON]
    assert "is for --seq-length 512, not 256" in refusal(
        capsys, "recipe", "gpt", *shorter, "--plan", plan, "--out", tmp_path / "b"
    )
    assert "--stages: the plan says it" in refusal(
        capsys, "recipe", "gpt", *SMALL[:4], *MEGATRON, "--plan", plan, "--stages", 2, "--out", tmp_path / "b"
    )


def test_another_sequence_is_in_the_script(tmp_path, capsys):
    main(["recipe", "gpt", *SMALL, "--seq-length", "256", *FEW, *MEGATRON, "--out", str(tmp_path / "out")])
    assert "--seq-length 256 --max-position-embeddings 256" in (tmp_path / "out" / "train.sh").read_text()


def test_a_configuration_of_hugging_face_is_written_and_checked(tmp_path, capsys):
    folder = tmp_path / "Mixtral-small"
    folder.mkdir()
    sizes = {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1024}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    config = {"model_type": "mixtral", "vocab_size": 32000, "max_position_embeddings": 4096, **sizes, **experts}
    (folder / "config.json").write_text(json.dumps(config))
    words = ["--hf", str(folder), "--cluster", "1x8-h100", "--global-batch-size", "32", "--schedule", "1f1b"]
    main(["recipe", "gpt", *words, *MEGATRON, "--out", str(tmp_path / "out")])
    assert "--num-experts 8 --moe-router-topk 2" in (tmp_path / "out" / "train.sh").read_text()
    capsys.readouterr()
    main(["recipe", "--check", str(tmp_path / "out")])
    assert "fits:" in capsys.readouterr().out
    assert main(["recipe", "--json", "--check", str(tmp_path / "out")]) == 0
    found = RecipeCheck.model_validate_json(capsys.readouterr().out)
    assert found.problems == []
    assert found.predicted.fits
    script = tmp_path / "out" / "train.sh"
    script.write_text(script.read_text().replace("--global-batch-size 32", "--global-batch-size 31"))
    assert main(["recipe", "--json", "--check", str(tmp_path / "out")]) == 1
    found = RecipeCheck.model_validate_json(capsys.readouterr().out)
    assert found.problems
    assert found.predicted is None


@pytest.mark.parametrize(
    ("words", "precision", "unfused"),
    [
        (["--model", "gpt3-96b", "--cluster", "4x8-a100-80gb", "--global-batch-size", "128"], "--bf16", False),
        (["--model", "gpt3-13b", "--cluster", "1x8-h100", "--global-batch-size", "32", "--no-bpipe"], "--bf16", False),
        ([*SMALL[:4], *FEW], "--fp16", True),
    ],
    ids=["of a paper with fp16", "fewer choices", "a GPU without bf16"],
)
def test_the_last_line_of_a_plan_writes_its_best_run(words, precision, unfused, tmp_path, capsys):
    """With the plan's sizes, precision, attention and time; `--check` reads the same time from the written flags."""
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    main(["plan", *words, "--out", str(plan)])
    command = capsys.readouterr().out.splitlines()[-1].split()
    assert command == ["evenpipe", "recipe", "--plan", str(plan), "--out", "DIR"]
    main([str(out) if word == "DIR" else word for word in command[1:]])
    best = json.loads(plan.read_text())["plans"][0]
    # Within a thousandth: under EvenPipe's own 1F1B, which a recipe starts, hand-overs travel beside compute.
    time = pytest.approx(best["iteration_ms"], rel=1e-3, abs=1)
    assert milliseconds(capsys.readouterr().out) == time
    script = (out / "train.sh").read_text()
    sizes = {
        "tensor-model-parallel-size": "tensor_parallel",
        "pipeline-model-parallel-size": "stages",
        "micro-batch-size": "micro_batch_size",
        "global-batch-size": "global_batch_size",
    }
    assert all(f"--{flag} {best[key]}" in script or best[key] == 1 for flag, key in sizes.items())
    assert best["schedule"] in script or best["schedule"] == "interleaved" or best["stages"] == 1
    assert precision in script
    assert ("--attention-backend unfused" in script) == unfused  # flash attention is Transformer Engine's default
    main(["recipe", "--check", str(out)])
    assert milliseconds(capsys.readouterr().out) == time


def milliseconds(printed):
    return float(re.search(r"([\d,]+) ms", printed)[1].replace(",", ""))


def test_a_plan_that_no_recipe_starts_says_what_to_plan_instead(capsys):
    words = ["plan", *SMALL[:4], "--global-batch-size", "32"]
    for framework, said in (("megatron-v3", "plan for megatron or deepspeed"), ("deepspeed", "--tensor-parallel 1")):
        main([*words, "--framework", framework])
        assert said in capsys.readouterr().out.splitlines()[-1]


def test_nothing_is_written_over_without_force(tmp_path, capsys):
    (tmp_path / "train.sh").write_text("mine")
    words = ["gpt", *SMALL, *FEW, *MEGATRON, "--out", str(tmp_path)]
    assert "--force" in refusal(capsys, "recipe", *words)
    assert (tmp_path / "train.sh").read_text() == "mine"
    main(["recipe", *words, "--force"])
    assert (tmp_path / "train.sh").read_text() != "mine"


BERT = ["--model", "bert-large", "--cluster", "1x8-v100-16gb", "--precision", "fp16", *FEW]
REFUSED = {
    "a BERT as a GPT": (["gpt", *BERT, *MEGATRON], "evenpipe recipe bert"),
    "no pretrain_bert.py": (
        ["bert", *BERT, *MEGATRON, "-s", "release=0.18"],
        "--set release=0.16, or --framework deepspeed",
    ),
    "no such release": (["gpt", *SMALL, *FEW, *MEGATRON, "-s", "release=0.13"], "0.14 to 0.19"),
    "BERT without data": (["bert", *BERT, *MEGATRON, "-s", "data=mock"], "no mock data"),
    "interleaved by DeepSpeed": (
        ["gpt", *SMALL, "--global-batch-size", 32, "--schedule", "interleaved", "--framework", "deepspeed"],
        "choose of",
    ),
    "model parallelism under DeepSpeed": (
        ["gpt", *SMALL, *FEW, "--schedule", "2bw", "--tensor-parallel", 2, "--framework", "deepspeed"],
        "plan with --tensor-parallel 1 --context-parallel 1, or use --framework megatron",
    ),
    "experts under DeepSpeed": (
        [
            "gpt",
            "--model",
            "mixtral-8x7b",
            "--cluster",
            "4x8-h100",
            "--global-batch-size",
            64,
            "--framework",
            "deepspeed",
        ],
        "use --framework megatron",
    ),
    "one stage under DeepSpeed": (
        ["gpt", *SMALL, "--global-batch-size", 32, "--stages", 1, "--framework", "deepspeed"],
        "one stage is no pipeline",
    ),
    "no such setting": (["gpt", *SMALL, *FEW, *MEGATRON, "-s", "dta=x"], "there is no such setting"),
    "no value": (["gpt", *SMALL, *FEW, *MEGATRON, "-s", "data"], "give key=value"),
    "an empty path": (["gpt", *SMALL, *FEW, *MEGATRON, "-s", "data="], "is empty"),
    "a port that is none": (["gpt", *SMALL, *FEW, *MEGATRON, "-s", "master_port=80"], "--set master_port='80'"),
    "hosts that are none": (["gpt", *SMALL, *FEW, *MEGATRON, "-s", "hosts=a;b"], "no host name"),
    "a host twice": (["gpt", *SMALL, *FEW, *MEGATRON, "-s", "hosts=a,a"], "'a' is named 2 times: name each node once"),
    "a time that is none": (
        ["gpt", *SMALL, *FEW, "--framework", "megatron", "--launcher", "slurm", "-s", "time=forever"],
        "--set time='forever': is no time limit of Slurm",
    ),
    "an image that is none": (
        ["gpt", *SMALL, *FEW, "--framework", "megatron", "--launcher", "kubernetes", "-s", "image=a b"],
        "--set image='a b': is no name of an image",
    ),
    "an image under Slurm": (
        ["gpt", *SMALL, *FEW, "--framework", "megatron", "--launcher", "slurm", "-s", "image=a"],
        "--set image: is of Kubernetes, and Slurm would not read it: leave it out",
    ),
    "too many hosts": (["gpt", *SMALL, *FEW, *MEGATRON, "-s", "hosts=a,b"], "names 2 of 1 nodes"),
    "no plan": (["gpt", *SMALL, *MEGATRON], "--global-batch-size: how many"),
    "a plan that is none": (["gpt", *SMALL[:4], *MEGATRON, "--plan", "/none"], "--plan /none: cannot be read"),
    "nothing that fits": (
        ["gpt", "--model", "gpt3-175b", "--cluster", "1x8-v100-16gb", "--global-batch-size", 8, *MEGATRON],
        "is too small for gpt3-175b",
    ),
    "no kind": ([*SMALL, *FEW, *MEGATRON], "gpt or bert"),
    "no framework": (["gpt", *SMALL, *FEW, "--launcher", "torchrun"], "missing --framework"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_does_not_exist_is_refused_with_what_to_use(why, tmp_path, capsys):
    words, said = REFUSED[why]
    launcher = [] if "--launcher" in words else ["--launcher", "slurm"]
    assert said in refusal(capsys, "recipe", *words, *launcher, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    said = refusal(capsys, "recipe", "gpt", *SMALL, *FEW, *MEGATRON, "--out", tmp_path / "file" / "out")
    assert f"--out {Path(tmp_path, 'file', 'out')}" in said
    assert "is a file" in refusal(capsys, "recipe", "gpt", *SMALL, *FEW, *MEGATRON, "--out", tmp_path / "file")
