"""`evenpipe estimate`: one JSON document, a table, and refusals that name the flag."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from evenpipe.cli.main import main
from tests.refusals import refusal

WHERE = ["estimate", "--model", "gpt3-96b", "--cluster", "4x8-a100-80gb"]
PLAN = [*WHERE, "--framework", "megatron-v3"]  # the paper's
SIZES = ["--tensor-parallel", "4", "--stages", "8", "--micro-batch-size", "2", "--global-batch-size", "128"]


def test_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    main([*PLAN, *SIZES, "--recompute", "selective", "--bpipe", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "evenpipe.estimate/1"
    assert (document["fits"], document["reason"]) == (True, None)
    assert document["mfu"] == pytest.approx(0.5064, abs=0.01)  # BPipe Table 7
    assert document["samples_per_second"] == pytest.approx(128e3 / document["iteration_ms"])
    assert document["tokens_per_second_per_gpu"] == pytest.approx(document["samples_per_second"] * 2048 / 32)
    assert document["logged_tflops_per_gpu"] == pytest.approx(312 * document["mfu"], rel=0.04)  # half of attention
    assert document["uncertainty"]["low"] < 0 < document["uncertainty"]["high"]
    assert len(document["stages"]) == 8
    assert set(document["stages"][0]) >= {"bytes", "forward_ms", "backward_ms"}
    names = {"weights", "gradients", "optimizer", "activations", "buffers", "communicators", "total"}
    assert set(document["stages"][0]["bytes"]) == names


def test_other_spellings_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    main([*PLAN, *SIZES, "--recompute", "selective", "--json"])
    one = capsys.readouterr().out
    main(
        [
            *PLAN,
            *[
                "--tensor",
                "4",
                "--pipeline",
                "8",
                "--micro-batch",
                "2",
                "--global-batch",
                "128",
                "--recompute",
                "attention",
                "--json",
            ],
        ]
    )
    assert capsys.readouterr().out == one


@pytest.mark.parametrize(
    ("cluster", "settings"),
    [("4x8-a100-80gb", ["bf16", "--attention", "flash"]), ("4x8-v100-16gb", ["fp16", "--attention", "unfused"])],
)
def test_unsaid_settings_are_those_of_today_s_megatron_on_that_gpu(
    cluster: str, settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Not those that the model's paper trained with."""
    shown = []
    for said in ([], ["--framework", "megatron", "--precision", *settings]):
        main([*WHERE[:-1], cluster, *SIZES, *said, "--json"])
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    main([*PLAN, *SIZES, "--recompute", "selective"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "does not fit" in shown
    assert re.search(r"[\d,]+ tokens/s/GPU", shown)
    assert re.search(r"[\d.]+ TFLOP/s/GPU as Megatron-LM logs it .*MFU [\d.]+% as papers count it", shown)
    assert "stage 0 needs 81.4 GiB and has 79.3: 2.0 too few" in shown


HF = {
    "model_type": "qwen2",
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "vocab_size": 1024,
    "intermediate_size": 512,
    "max_position_embeddings": 40960,
}


def test_a_configuration_of_hugging_face_is_estimated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF))
    asked = ["estimate", "--hf", str(tmp_path), "--cluster", "1x1-h100", "--global-batch-size", "8", "--json"]
    main(asked)
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert (document["fits"], shown.err) == (True, "")
    assert "left out of the model's description: biases of queries, keys and values" in document["warnings"]
    main([*asked, "--seq-length", "8192"])
    assert json.loads(capsys.readouterr().out)["iteration_ms"] > document["iteration_ms"]
    main([*asked[:-1], "--seq-length", "8192"])
    assert "8,192 tokens a sample" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tensor-parallel", "3"], "--cluster 4x8-a100-80gb: its 32 GPUs do not divide into replicas of 3"),
        (
            ["--tensor-parallel", "16"],
            "--tensor-parallel 16: does not divide gpt3-96b's key_value_heads (104)",
        ),
        (["--stages", "64"], "--cluster 4x8-a100-80gb: has 32 GPUs, 32 too few"),
        (["--stages", "32"], "--stages 32: 80 layers do not divide by 32 parts"),
        (["--model", "gpt3-69b"], "--model gpt3-69b: unknown among models, did you mean gpt3-96b?"),
        (["--framework", "megatrn"], "--framework megatrn: unknown among frameworks, did you mean megatron"),
        (["--schedule", "2bw", "--stages", "16", "--global-batch-size", "8"], "2bw needs at least as many"),
        (
            ["--evenpipe-delay-correction", "nesterov"],
            "nesterov: only --schedule 2bw has gradients that are a batch late",
        ),
        (["--layout", "4,x"], "'4,x' is no list of numbers"),
        (["--layout", "4m,4m"], "'4m,4m' has m in 2 parts"),
        (["--stages", "2", "--layout", "40m,40"], "gpt3-96b predicts no further tokens: leave out m"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refusal(capsys, *PLAN, "--global-batch-size", "128", *flags)
