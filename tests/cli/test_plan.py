"""`evenpipe plan`: a table, one JSON document, a picture, and refusals that name the flag."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from matplotlib.image import imread

from evenpipe.cli.main import main
from evenpipe.planner.search.plan import Plan
from tests.refusals import refusal

ASKED = ["plan", "--model", "gpt3-13b", "--cluster", "1x8-a100-80gb", "--global-batch-size", "32"]
FEW = ["--schedule", "1f1b,interleaved"]


def test_the_document_is_printed_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main([*ASKED, *FEW, "--json", "--top", "3", "--out", str(tmp_path / "plan.json")])
    printed = capsys.readouterr().out
    assert (tmp_path / "plan.json").read_text() == printed
    plan = Plan.model_validate_json(printed)
    assert plan.format == "evenpipe.plan/1"
    assert len(plan.plans) == 3
    best = plan.plans[0]
    assert best.tensor_parallel * best.stages * best.data_parallel == 8
    assert best.micro_batches * best.micro_batch_size * best.data_parallel == best.global_batch_size == 32
    assert best.accumulation == best.micro_batches / best.stages
    assert len(best.each_stage) == best.stages
    assert max(stage.bytes["total"] for stage in best.each_stage) / 2**30 == best.memory_gib <= plan.device_gib
    assert best.mfu >= 0.98 * max(one.mfu for one in plan.front)
    assert "1f1b" in {one.family for one in plan.rejected}


def test_the_flags_are_those_of_an_estimate_of_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    main([*ASKED, *FEW, "--attention", "flash", "--json", "--top", "1"])
    best = Plan.model_validate_json(capsys.readouterr().out).plans[0]
    main(["estimate", *ASKED[1:5], *best.flags.split()])
    assert f"MFU {best.mfu:.1%}" in capsys.readouterr().out


def test_another_sequence_is_planned_and_told_to_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    main([*ASKED, *FEW, "--seq-length", "1024", "--top", "1"])
    shown = capsys.readouterr().out
    assert "samples of 1,024 tokens" in " ".join(shown.split())
    line = next(line for line in shown.splitlines() if line.startswith("evenpipe estimate"))
    main(shlex.split(line)[1:])
    again = " ".join(capsys.readouterr().out.split())
    assert "1,024 tokens a sample" in again
    assert re.findall(r"iteration (?:takes )?([\d,]+) ms", again) == re.findall(r"takes ([\d,]+) ms", shown)


def test_the_table_and_the_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main([*ASKED, *FEW, "--picture", str(tmp_path / "front.png")])
    shown = capsys.readouterr().out
    parts = ("bubble", "MFU", "GiB of each stage", "TFLOP/s", "tokens/s", "not taken", "1f1b:", "simulated")
    for wanted in parts:
        assert wanted in shown
    assert imread(tmp_path / "front.png").shape[2] == 4


def test_an_engine_plans_what_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main([*ASKED, "--framework", "deepspeed"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "interleaved: DeepSpeed does not run it (several model chunks a stage)" in shown
    assert "recompute selective" not in shown


def test_a_further_token_on_a_stage_of_its_own_is_estimated_as_planned(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", "deepseek-v3", "--cluster", "16x64-gb200"]
    fixed = [*("--stages", "32", "--tensor-parallel", "1", "--context-parallel", "1", "--micro-batch-size", "1")]
    main(["plan", *asked, *fixed, "--schedule", "1f1b", "--no-bpipe", "--global-batch-size", "4096", "--json"])
    best = json.loads(capsys.readouterr().out)["plans"][0]
    assert (best["further_part"], best["layout"][-2:]) == (30, [1, 0])
    main(["estimate", *asked, *best["flags"].split(), "--json"])
    assert json.loads(capsys.readouterr().out)["iteration_ms"] == best["iteration_ms"]


def test_the_older_name_of_schedule_is_taken_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    documents = []
    for option in ("--schedule", "--schedules"):
        main([*ASKED, option, "1f1b", "--json"])
        documents.append(capsys.readouterr().out)
    assert documents[0] == documents[1]
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "--schedules" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--precision", "bf16,fp9"], "'fp9': unknown, did you mean fp8?"),
        (["--precision", "bf16,fp8"], "has no fp8"),
        (["--moe-dispatchers", "deepep"], "has no experts: leave it out"),
        (["--model", "gpt3-31b"], "--model gpt3-31b: unknown among models, did you mean gpt3-13b?"),
        (["--cluster", "1x8-a100-80g"], "--cluster 1x8-a100-80g: unknown among clusters, did you mean"),
        (["--framework", "deepsped"], "--framework deepsped: unknown among frameworks, did you mean deepspeed?"),
        (["--schedule", "1f1b,v-haf"], "--schedule v-haf: unknown schedule"),
        (["--framework", "deepspeed", "--schedule", "v-half"], "--schedule v-half: DeepSpeed does not run it ("),
        (["--model", "gpt3-175b"], "--cluster 1x8-a100-80gb: is too small for gpt3-175b"),
        (["--cluster", "1024x8-a100-80gb", "--global-batch-size", "2"], "--global-batch-size 2: nothing reaches it"),
        (["--cluster", "1x8-v100-32gb", "--precision", "bf16"], "--precision bf16: v100-32gb computes fp32, fp16"),
        (["--tensor-parallel", "3"], "--tensor-parallel 3: none of what divides"),
        (["--out", "/nowhere/plan.json"], "there is no folder /nowhere"),
        (["--picture", "plan.pdf"], "pictures are PNG"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refusal(capsys, *ASKED, *flags)


def test_an_unknown_key_of_a_model_s_file_is_named_with_its_path(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text(
        "models:\n  mine: {layers: 8, hidden: 1024, heads: 16, vocabulary: 50304, sequence: 1024, hiden: 3}\n"
    )
    with pytest.raises(SystemExit):
        main([*ASKED, "--model", str(own)])
    assert "mine.yaml: mine.hiden: unknown key, did you mean hidden?" in capsys.readouterr().err


UNLIKE = """
clusters:
  ours:
    gpus_per_node: 4
    node_gbps: 3.0  # between the groups
    latency_us: 25.0
    node_latency_us: 40.0
    nodes:
      - {device: h100, count: 2, node_gbps: 50.0, node_latency_us: 25.0}
      - {device: a100-80gb, count: 1, slowness: 1.25}
      - {device: a100-80gb, count: 1}
"""


def test_stages_of_a_plan_on_unlike_nodes_say_where_they_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan's own commands estimate it, and write the files that start it in the order of the list."""
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(UNLIKE)
    asked = ["plan", "--model", "llama3-8b", "--cluster", "own.yaml", "--global-batch-size", "32"]
    main([*asked, "--schedule", "1f1b", "--stages", "4", "--no-bpipe", "--json", "--top", "1"])
    plan = Plan.model_validate_json(capsys.readouterr().out)
    where = ["nodes 0-1 (h100)"] * 2 + ["node 2 (a100-80gb, slowness 1.25)", "node 3 (a100-80gb)"]
    assert [stage.nodes for stage in plan.plans[0].each_stage] == where
    estimate, recipe = (shlex.split(command)[1:] for command in plan.commands)
    main(estimate)
    assert "stages 0-1 on nodes 0-1 (h100); stage 2 on node 2 (a100-80gb, slowness 1.25)" in capsys.readouterr().out
    main(recipe)
    readme = Path("DIR", "README.md").read_text()
    assert "On node N, from 0 to 3" in readme
    assert "GiB** of 79.1." in readme, "the fullest stage is on the H100s"
    with pytest.raises(SystemExit):
        main([word if word != "torchrun" else "slurm" for word in recipe] + ["--force"])
    assert "--launcher slurm: orders nodes itself, and own.yaml has unlike ones" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(
            ["partition", "--model", "gpt2-large", "--stages", "2", "--micro-batch-size", "1", "--cluster", "own.yaml"]
        )
    assert "own.yaml: has unlike nodes, whose layers evenpipe plan lays out" in capsys.readouterr().err


def test_several_precisions_are_weighed_only_where_they_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "llama3-8b", "--cluster", "1x8-h100", "--global-batch-size", "32", "--schedule", "1f1b"]

    def planned(*more: str) -> Plan:
        main([*asked, "--json", "--top", "1", *more])
        return Plan.model_validate_json(capsys.readouterr().out)

    bf16, fp8, both = planned(), planned("--precision", "tensorwise"), planned("--precision", "bf16,tensorwise")
    assert [one.plans[0].quantized for one in (bf16, fp8, both)] == [None, "tensorwise", "tensorwise"]
    assert both.plans[0].iteration_ms == fp8.plans[0].iteration_ms < bf16.plans[0].iteration_ms
    assert planned("--precision", "fp8", "--fp8-recipe", "tensorwise").plans == fp8.plans
    [reason] = [one.reason for one in both.rejected if one.family == "products in bf16"]
    assert "slower" in reason
    main(["estimate", *asked[1:5], *both.plans[0].flags.split(), "--json"])
    assert json.loads(capsys.readouterr().out)["iteration_ms"] == both.plans[0].iteration_ms


def test_gradients_in_half_precision_are_weighed_only_where_they_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """They take less memory, and less time to reduce; the recipe of such a plan has Megatron's flag."""
    asked = ["--model", "llama3-8b", "--cluster", "1x8-h100", "--seq-length", "4096"]
    given = ["plan", *asked, "--global-batch-size", "32", "--schedule", "1f1b", "--top", "1", "--json"]

    def planned(*more: str) -> Plan:
        main([*given, *more])
        return Plan.model_validate_json(capsys.readouterr().out)

    usual, wide, both = planned(), planned("--gradients", "fp32"), planned("--gradients", "fp32,half")
    assert usual.plans[0].iteration_ms == wide.plans[0].iteration_ms > both.plans[0].iteration_ms
    assert "--no-gradients-in-fp32" in both.plans[0].flags
    assert "slower" in next(one.reason for one in both.rejected if one.family == "gradients in fp32")
    main(["estimate", *asked, *both.plans[0].flags.split(), "--json"])
    assert json.loads(capsys.readouterr().out)["iteration_ms"] == both.plans[0].iteration_ms
    planned("--gradients", "half", "--out", str(tmp_path / "PLAN.json"))
    main(["recipe", "--plan", str(tmp_path / "PLAN.json"), "--out", str(tmp_path / "recipe")])
    assert "--grad-reduce-in-bf16" in (tmp_path / "recipe" / "train.sh").read_text()
    for more, refused in (("--framework deepspeed", "of Megatron only"), ("--precision fp32", "leave one out")):
        with pytest.raises(SystemExit):
            main([*given, "--gradients", "half", *more.split()])
        assert refused in capsys.readouterr().err


def test_several_dispatchers_are_weighed_only_where_they_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "qwen3-30b-a3b", "--cluster", "2x8-h100", "--global-batch-size", "64", "--stages", "1"]
    main([*asked, "--moe-dispatchers", "alltoall,hybridep", "--schedule", "1f1b", "--json", "--top", "1"])
    plan = Plan.model_validate_json(capsys.readouterr().out)
    assert (plan.plans[0].expert_parallel > 1, plan.plans[0].dispatcher) == (True, "hybridep")
    assert "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep" in plan.plans[0].flags
    assert [one.family for one in plan.rejected].count("dispatcher alltoall") == 1
    assert "--moe-dispatchers alltoall,hybridep" in plan.commands[1]
