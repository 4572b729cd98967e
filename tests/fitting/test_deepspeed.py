"""`evenpipe fit` of DeepSpeed's configuration: keys to change, in a new file, or one line."""

import json
import shlex

import pytest

from evenpipe.cli.main import main
from evenpipe.fitting.deepspeed import in_deepspeed

CONFIGURATION = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
}
WHERE = "--model llama3-8b --stages 4 --cluster 1x8-h100"


@pytest.fixture
def fit(capsys, tmp_path):
    """Return what fits a configuration with these keys changed, and returns what it prints."""

    def call(words=WHERE, line=None, **keys):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({**CONFIGURATION, **keys}))
        main(["fit", *shlex.split(words), *(line(str(path)) if line else [str(path)])])
        return capsys.readouterr().out

    return call


def test_answers_are_keys_and_the_changed_configuration_is_the_run_that_was_promised(fit, tmp_path):
    found = json.loads(fit(f"{WHERE} --json"))
    assert found["format"] == "evenpipe.fit/1"
    assert not found["now"]["fits"]
    by_name = {name: one for one in found["answers"] for name in one["names"]}
    assert by_name["least"]["added"] == ["in the script: PipelineModule(activation_checkpoint_interval=1)"]
    assert by_name["least"]["loss"] == "same bits"
    stock = by_name["stock"]
    assert stock["changes"] == {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 32,
        "zero_optimization": {"stage": 1},
    }
    assert stock["removed"] == ['"train_micro_batch_size_per_gpu": 4', '"gradient_accumulation_steps": 8']
    new = tmp_path / "new.json"
    fit(f"{WHERE} --take stock --write {new}")
    written = json.loads(new.read_text())
    assert written == {**CONFIGURATION, **stock["changes"]}
    again = json.loads(fit(f"{WHERE} --json", **written))
    assert again["now"]["fits"]
    assert again["now"]["iteration_ms"] == pytest.approx(stock["iteration_ms"])
    with pytest.raises(SystemExit):
        fit(f"{WHERE} --take stock --write {new}")


def test_a_line_of_deepspeed_s_names_its_configuration_and_the_section_is_what_runs_today(fit):
    section = {"schedule": "1f1b", "bpipe": True, "swap": 0.5}
    words = f"{WHERE} --recompute full"
    shown = fit(words, lambda path: ["--", "deepspeed", "train.py", "--deepspeed_config", path], evenpipe=section)
    assert "1f1b with BPipe, recompute full" in shown
    assert "evenpipe.swap: not in these estimates" in shown


def test_a_section_that_a_faster_run_has_comes_after_deepspeed_s_own_keys(fit):
    found = json.loads(fit("--model llama3-8b --stages 8 --cluster 1x8-h200 --json", train_micro_batch_size_per_gpu=1))
    ours = [one for one in found["answers"] if "evenpipe" in one["names"]]
    for one in ours:
        assert list(one["changes"])[-1] == "evenpipe"
        assert one["evenpipe"]["schedule"] in ("1f1b", "kfkb", "zb-h1")
    assert ours


@pytest.mark.parametrize(
    ("words", "keys", "said"),
    [
        ("--stages 4 --cluster 1x8-h100", {}, "ds.json: does not say what the model is: give --model NAME or --hf"),
        ("--model llama3-8b --cluster 1x8-h100", {}, "stages of PipelineModule are: give --stages"),
        ("--model llama3-8b --stages 4", {}, "the GPUs are: give --cluster"),
        ("--model llama3-8b --stages 3 --cluster 1x8-h100", {}, "3 GPUs, into which 8 do not divide"),
        (WHERE, {"zero_optimization": {"stage": 3}}, "ds.json: zero_optimization.stage 3: DeepSpeed's pipelines work"),
        (WHERE, {"train_micro_batch_size_per_gpu": "auto"}, "train_micro_batch_size_per_gpu: 'auto' is no whole"),
        (WHERE, {"train_batch_size": 63}, "ds.json: train_batch_size 63: is not 4"),
        (WHERE, {"evenpipe": {"schedule": "1f1"}}, "ds.json: evenpipe.schedule"),
        (f"{WHERE} --memory-gib 12", {}, "no micro-batch size, ZeRO-1, recomputation or schedule fits llama3-8b"),
        (f"{WHERE} --take sized --write x.json", {}, "--take sized: DeepSpeed's answers are least, stock, evenpipe"),
        (f"{WHERE} --take least --write x.json", {}, "changes the script alone, no key"),
    ],
)
def test_what_cannot_be_read_or_answered_is_one_line(fit, words, keys, said, capsys):
    with pytest.raises(SystemExit) as end:
        fit(words, **keys)
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1, told
    assert said in told


def test_what_only_deepspeed_s_json_needs_is_refused_beside_a_line_of_megatron_s(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--model", "llama3-8b", "--", "torchrun", "pretrain_gpt.py"])
    assert "--model: is for DeepSpeed's JSON only: leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("advice", ["give --recompute selective", "or --sharded-optimizer", "give --attention flash"])
def test_advice_has_no_option_that_a_configuration_cannot_take(advice):
    assert "--" not in in_deepspeed(advice)
