"""--group-size auto in unmodified scripts: the same samples make the same losses, in micro-batches that fit."""

import json
import re

import pytest

from tests.megatron_lm.launch import LAYOUTS, Run, gpt_flags, launch, model_flags

AUTO = ("--evenpipe-schedule", "kfkb", "--group-size", "auto")
EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-router-score-function", "sigmoid"),
    *("--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", "0.1", "--disable-bias-linear"),
    *("--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "1e-2"),
)
SUMMATION = 2e-5
"""Relative: what sums of other order and in fp32, printed with seven digits, may differ by after four iterations."""


def decisions(run: Run) -> dict[int, tuple[int, int, str]]:
    """k, b and the words about what was before, by the iteration from which on it was so."""
    line = re.compile(r"\[evenpipe\] iteration (\d+): k=(\d+), b=(\d+)(.*?); estimates: .*; links measured in [\d.]+ s")
    return {int(number): (int(k), int(b), was) for number, k, b, was in line.findall(run.output)}


def losses(run: Run) -> list[float]:
    return [float(loss) for line in run.lines for loss in re.findall(r"lm loss: (\S+)", line)]


@pytest.mark.every_release
def test_gpt_is_cut_to_fit_trains_as_stock_and_goes_on_tuning_after_a_stop(megatron_lm, tmp_path):
    """The loader's micro-batches of eight samples do not fit; shards of a tensor-parallel group are cut alike."""
    processes, parallel = LAYOUTS["TP2xPP2"]
    flags = [*gpt_flags(5), *parallel, "--micro-batch-size", "8", "--ckpt-format", "torch"]
    flags += ["--save-interval", "3"]
    ours = [*flags, *AUTO, "--memory-gib", "0.016", "--retune-interval", "2"]
    stock = launch(megatron_lm, "pretrain_gpt.py", processes, flags)
    stopped = launch(
        megatron_lm, "pretrain_gpt.py", processes, [*ours, "--save", str(tmp_path / "a"), "--exit-interval", "3"]
    )
    assert losses(stopped) == pytest.approx(losses(stock)[:3], rel=SUMMATION)
    made = decisions(stopped)
    assert list(made) == [1, 3]
    assert all(b < 8 for _, b, _ in made.values())
    assert made[1][2] == ""

    saved = json.loads((tmp_path / "a" / "iter_0000003" / "evenpipe_tuner.json").read_text())["state"]
    assert saved["tuner"]["current"][:2] == list(made[3][:2])
    resumed = launch(
        megatron_lm,
        "pretrain_gpt.py",
        processes,
        [*ours, "--load", str(tmp_path / "a"), "--save", str(tmp_path / "b")],
    )
    assert "checkpoint of iteration 3: goes on tuning as it was saved" in resumed.output
    assert list(decisions(resumed)) == [5]
    k, b, was = decisions(resumed)[5]
    assert was == (" (as before)" if (k, b) == made[3][:2] else " (was k={}, b={})".format(*made[3]))
    [wanted], [found] = ([float(run.validation[-1].split()[-1])] for run in (stock, resumed))
    assert found == pytest.approx(wanted, rel=1e-3)  # of a perplexity, whose exponent is summed otherwise


@pytest.mark.long
def test_masked_tokens_leave_micro_batches_as_they_are(megatron_lm, bert_data):
    script, (processes, parallel) = "pretrain_bert.py", LAYOUTS["PP2"]
    if not (megatron_lm / script).exists():
        pytest.skip(f"{megatron_lm.name} has no {script}")
    flags = [*model_flags(megatron_lm, script, 3, bert_data), *parallel, "--micro-batch-size", "2"]
    stock = launch(megatron_lm, script, processes, flags)
    tuned = launch(megatron_lm, script, processes, [*flags, *AUTO, "--memory-gib", "1"])
    assert tuned.lines == stock.lines
    assert len(stock.lines) == 3
    assert tuned.validation == stock.validation
    assert "micro-batches stay of --micro-batch-size 2 samples: samples count different tokens" in tuned.output
    assert [b for _, b, _ in decisions(tuned).values()] == [2]


def test_what_deepseek_v3_trains_with_is_tuned_and_logged_as_stock(megatron_lm):
    """A dry run's losses are not among those of the log, its tokens not those that the experts' bias goes by."""
    processes, parallel = LAYOUTS["PP2"]
    flags = [*gpt_flags(3), *parallel, "--mtp-num-layers", "1", "--position-embedding-type", "rope", *EXPERTS]
    stock = launch(megatron_lm, "pretrain_gpt.py", processes, flags)
    tuned = launch(megatron_lm, "pretrain_gpt.py", processes, [*flags, *AUTO, "--memory-gib", "1"])
    assert all("mtp_1 loss" in line for line in stock.lines)
    assert tuned.lines == stock.lines
    assert tuned.validation == stock.validation


def test_too_little_memory_is_one_line(megatron_lm):
    processes, parallel = LAYOUTS["PP2"]
    flags = [*gpt_flags(3), *parallel, *AUTO, "--memory-gib", "0.01"]
    run = launch(megatron_lm, "pretrain_gpt.py", processes, flags, check=False)
    assert run.returncode != 0
    [line] = [line for line in run.output.splitlines() if line.startswith("evenpipe: error: ")]
    assert line.startswith("evenpipe: error: --memory-gib 0.01: no micro-batch size fits: stage 1 needs ")
    assert "give at least 0.0" in line
    assert "Traceback" not in run.output.partition(line)[0]
