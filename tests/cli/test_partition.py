"""`evenpipe partition`: plans and profiles as documents, a picture, the largest batch; and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evenpipe.cli.main import main
from evenpipe.stage_code import Draws, load_parts
from tests.refusals import refusal

MODEL = """
import torch
from torch import nn

class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()

def chain():
    return Chain(), {"x": torch.ones(4, 32)}

def broken():
    raise RuntimeError("no weights here")

class Branching(Chain):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)

def branching():
    return Branching(), {"x": torch.ones(4, 32)}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "chain.py"
    path.write_text(MODEL)
    return path


@pytest.fixture(scope="module")
def profile(file: Path) -> Path:
    path = file.with_name("profile.json")
    main(["partition", "--module", f"{file}:chain", "--stages", "2", "--json", "--profile-out", str(path)])
    return path


def test_a_plan_covers_all_nodes_with_the_times_of_the_profile(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    out, picture = tmp_path / "P.json", tmp_path / "P.png"
    main(
        [
            *("partition", "--profile", str(profile), "--stages", "3", "--schedule", "1f1b", "--json"),
            *("--out", str(out), "--picture", str(picture)),
        ]
    )
    plan = json.loads(capsys.readouterr().out)
    assert plan == json.loads(out.read_text())
    assert plan["format"] == "evenpipe.partition/1"
    nodes = json.loads(profile.read_text())["nodes"]
    stages = plan["stages"]
    assert [stage["last_node"] for stage in stages[:-1]] == plan["cuts"]
    assert all(nodes[cut]["cut_allowed"] for cut in plan["cuts"])
    assert [stage["first_node"] for stage in stages] == [0, *(cut + 1 for cut in plan["cuts"])]
    assert stages[-1]["last_node"] == len(nodes) - 1
    for stage in stages:
        mine = nodes[stage["first_node"] : stage["last_node"] + 1]
        assert stage["forward_ms"] == pytest.approx(sum(node["forward_ms"] for node in mine))
        assert stage["backward_ms"] == pytest.approx(sum(node["backward_ms"] for node in mine))
        assert stage["peak_bytes"] == stage["peak_bytes_before"] > sum(node["parameter_bytes"] for node in mine)
    slowest = max(stage["forward_ms"] + stage["backward_ms"] + stage["extra_ms"] for stage in stages)
    assert slowest == pytest.approx(plan["max_stage_ms"])
    assert plan["optimum_ms"] <= plan["max_stage_ms"]
    assert plan["batch_ms"] <= plan["layers_batch_ms"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["report", str(out), "--html", str(tmp_path / "P.html")]) == 0
    page = (tmp_path / "P.html").read_text()
    assert all(said in page for said in ("Parts of the model", "Where time goes", f"0–{plan['cuts'][0]}"))


def test_what_is_only_weighed_has_a_page_without_a_timeline(profile: Path, tmp_path: Path) -> None:
    out = tmp_path / "P.json"
    main(["partition", "--profile", str(profile), "--stages", "3", "--schedule", "pipedream", "--out", str(out)])
    assert main(["report", str(out), "--html", str(tmp_path / "P.html")]) == 0
    page = (tmp_path / "P.html").read_text()
    assert "Parts of the model" in page
    assert "Timeline" not in page


def test_the_code_of_every_stage_is_beside_the_plan(file: Path, tmp_path: Path) -> None:
    asked = ["partition", "--module", f"{file}:chain", "--stages", "2", "--json", "--out"]
    main([*asked, str(tmp_path / "P.json")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["P.json", "P.stage0.py", "P.stage1.py"]
    assert "chain.py:12: x = x + layer(x)" in (tmp_path / "P.stage1.py").read_text()
    namespace: dict[str, Any] = {}
    exec(compile(file.read_text(), "chain.py", "exec"), namespace)
    model, inputs = namespace["chain"]()
    sent: tuple[Tensor, ...] = ()
    for stage in range(2):
        (part,) = load_parts(tmp_path / "P.json", stage, model)
        sent = part(inputs, Draws(0, 0), *sent)
    assert torch.equal(sent[0], model(**inputs))


def test_stages_that_would_train_otherwise_than_the_model_are_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here by a number that forward reads from a file, which tracing has taken in."""
    file = tmp_path / "drifting.py"
    file.write_text(
        "from pathlib import Path\nimport torch\nfrom torch import nn\n\n\n"
        "class Drifting(nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        scale = Path(__file__).with_name('scale')\n"
        "        scale.write_text('x' + (scale.read_text() if scale.exists() else ''))\n"
        "        return (super().forward(x) * len(scale.read_text())).square().mean()\n\n\n"
        "def made():\n    return Drifting(nn.Linear(4, 4), nn.Linear(4, 4)), {'x': torch.randn(2, 4)}\n"
    )
    said = refusal(capsys, "partition", "--module", f"{file}:made", "--stages", "2", "--out", str(tmp_path / "P.json"))
    assert "P.json: the loss by the plan's stages differs from the model's own by " in said
    assert not list(tmp_path.glob("P.*"))


def test_additions_in_another_order_are_no_difference_in_bf16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of Llama, whose loss is in fp32."""
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **heads}))
    asked = ["--precision", "bf16", "--sequence-length", "64", "--stages", "2", "--json"]
    main(["partition", "--hf", str(config), *asked, "--out", str(tmp_path / "P.json")])
    assert (tmp_path / "P.stage1.py").exists()
    assert capsys.readouterr().err == ""


def test_links_between_stages_are_a_clusters_or_as_said_and_slow_ones_are_warned_of(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    asked = ["partition", "--profile", str(profile), "--stages", "2", "--json", "--link-gbps", "7"]
    shared = tmp_path / "slow.yaml"
    shared.write_text(
        "clusters: {slow: {device: a100-40gb, nodes: 2, gpus_per_node: 1, peer_gbps: 300, node_gbps: 0.001, "
        "latency_us: 2, node_latency_us: 50, sources: {all: drawn}}}"
    )
    said = []
    for links in (["--stage-gbps", "1000"], ["--cluster", str(shared)]):
        capsys.readouterr()
        main([*asked, *links])
        said.append(capsys.readouterr())
    fast, slow = (json.loads(one.out) for one in said)
    assert fast["host_gbps"] == slow["host_gbps"] == 7
    (crossing,) = slow["crossings"]
    assert crossing["transmit_ms"] == pytest.approx(crossing["nbytes"] / 1e3)
    assert crossing["latency_ms"] == 0.05
    assert slow["batch_ms"] > fast["batch_ms"]
    assert "condition 2 of DawnPiper's Theorem 4.1" in said[1].err
    assert said[1].err.count("\n") == 1
    assert "1x1-a100-40gb: has 1 GPUs, too few for 2 stages" in refusal(
        capsys, "partition", *asked[1:], "--cluster", "1x1-a100-40gb"
    )
    assert "has h100, and times are of a100-40gb" in refusal(capsys, "partition", *asked[1:], "--cluster", "1x8-h100")


def test_what_the_error_asks_for_is_enough(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--profile", str(profile), "--stages", "2", "--memory-gib"]
    said = refusal(capsys, "partition", *asked, "0.0001")
    assert "--memory-gib 0.0001: no partition fits: give at least " in said
    enough = said.partition("at least ")[2].split(",")[0].strip()
    main(["partition", *asked, enough, "--json"])
    assert max(stage["peak_bytes"] for stage in json.loads(capsys.readouterr().out)["stages"]) <= float(enough) * 2**30


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--module", "FILE:missing", "--stages", "2"), "chain.py:missing"),
        (("--module", "FILE:broken", "--stages", "2"), "chain.py:19: RuntimeError: no weights here"),
        (("--module", "FILE:branching", "--stages", "2"), "chain.py:23"),
        (("--profile", "PROFILE", "--stages", "500"), "--stages 500: 500 stages need 499 cuts, and the model has"),
        (("--profile", "PROFILE", "--stages", "2", "--schedule", "1f1"), "1f1"),
        (("--profile", "PROFILE", "--stages", "2", "--model", "bert-large"), "not of --model bert-large"),
        (("--profile", "PROFILE", "--stages", "2", "--micro-batch-size", "3"), "is of 4, not of --micro-batch-size 3"),
        (("--profile", "FILE", "--stages", "2"), "no evenpipe.profile/1"),
        (("--profile", "PROFILE", "--stages", "2", "--max-batch"), "--max-batch: a profile is of one micro-batch size"),
        (
            (
                "--profile",
                "PROFILE",
            ),
            "--stages: how many?",
        ),
        (("--stages", "2"), "name one of --model, --module, --hf, --megatron or --profile"),
        (("--module", "FILE:chain", "--stages", "2", "--device", "a100"), "a100: unknown among devices"),
        (("--profile", "PROFILE", "--stages", "2", "--", "--num-layers", "8"), "flags are for --megatron"),
        (("--profile", "PROFILE", "--stages", "2", "--half-layers"), "--half-layers: is for --megatron"),
        (("--megatron", "--optimize", "recompute", "--", "--num-layers", "8"), "Give --memory-gib"),
        (("--megatron", "--optimize", "swap+recompute", "--", "--num-layers", "8"), "and swap nothing: recompute"),
    ],
)
def test_what_cannot_be_is_one_line(
    flags: tuple[str, ...], said: str, file: Path, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    given = [word.replace("FILE", str(file)).replace("PRO" + str(file), str(profile)) for word in flags]
    assert said in refusal(capsys, "partition", *given)
