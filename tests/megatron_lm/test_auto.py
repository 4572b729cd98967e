"""--evenpipe auto in an unmodified script: what is chosen fits, trains to the bits of a stock run, and is kept."""

import json
import re
import shutil

import pytest

from tests.megatron_lm.launch import EXPERTS, LAYOUTS, differences, gpt_flags, launch, model_flags

ITERATIONS, STOPPED = 6, 3
#: Most of what stages hold here are activations.
SMALL = (
    *("--vocab-size", "256", "--seq-length", "256", "--max-position-embeddings", "256", "--hidden-size", "32"),
    *("--eval-iters", "0"),
)
#: What a run is compared with: in a V weights are drawn otherwise, and `test_vee.py` compares that with stock.
REFERENCE = {"PP4": (), "PP4xVPP2": ("--evenpipe-schedule", "v-half")}
#: Of the fullest stage under Megatron's own order, with weights, optimizer and messages.
STOCK_MIB = 14.4
CHOICE = re.compile(
    r"\[evenpipe\] auto: 8 micro-batches: (.*): ([\d,.]+) ms an iteration, ([\d.]+) MiB on stage \d, of"
)


def gib(part):
    return f"{part * STOCK_MIB / 2**10:.6f}"


def held_within(run, folder):
    """Assert that no stage saved more in any iteration than what the state in `folder` has room for."""
    room = json.loads((folder / "evenpipe_auto.json").read_text())["state"]["costs"]["memory_bytes"]
    rows = re.findall(r"peak saved MiB: ([\d. ]+) \|", run.output)
    assert rows
    for row in rows:
        for saved, most in zip(row.split(), room, strict=True):
            assert float(saved) <= 1.02 * most / 2**20


@pytest.mark.parametrize("layout", ["PP4", pytest.param("PP4xVPP2", marks=pytest.mark.long)])
def test_a_choice_fits_trains_to_the_bits_of_stock_and_is_kept_until_the_memory_changes(megatron_lm, layout, tmp_path):
    processes, parallel = LAYOUTS[layout]
    flags = [*gpt_flags(ITERATIONS), *parallel, *SMALL, "--save-interval", str(STOPPED)]

    def run(name, *more, after=None):
        if after is not None:
            shutil.copytree(tmp_path / after, tmp_path / name)
        kept = ["--save", str(tmp_path / name), *(["--load", str(tmp_path / name)] if after is not None else [])]
        return launch(megatron_lm, "pretrain_gpt.py", processes, [*flags, *more, *kept])

    last = f"iter_{ITERATIONS:07d}"
    auto = ("--evenpipe", "auto", "--memory-gib")
    stock = run("stock", *REFERENCE[layout])
    stopped = run("stopped", *auto, gib(0.9), "--exit-interval", str(STOPPED))
    [(name, _, held)] = CHOICE.findall(stopped.output)
    assert name not in ("1f1b", "interleaved")
    assert float(held) <= 0.9 * STOCK_MIB
    held_within(stopped, tmp_path / "stopped" / f"iter_{STOPPED:07d}")

    kept = run("kept", *auto, gib(0.9), after="stopped")
    assert "checkpoint of iteration 3: trains by the schedule that was chosen" in kept.output
    assert CHOICE.findall(kept.output) == []
    held_within(kept, tmp_path / "kept" / last)

    changed = run("changed", *auto, gib(0.6), after="stopped")
    assert "checkpoint of iteration 3: has no choice for these settings: chooses again" in changed.output
    [(_, _, held)] = CHOICE.findall(changed.output)
    assert float(held) <= 0.6 * STOCK_MIB
    held_within(changed, tmp_path / "changed" / last)

    assert stopped.lines == stock.lines[:STOPPED]
    for resumed in (kept, changed):  # whose second line has, in stock runs too, a loss of two iterations
        assert [resumed.lines[0], resumed.lines[2]] == [stock.lines[3], stock.lines[5]]
    for ours in ("kept", "changed"):
        assert differences(tmp_path / "stock" / last, tmp_path / ours / last) == []


def test_many_virtual_stages_stay_where_megatron_has_them(megatron_lm, tmp_path):
    processes, parallel = LAYOUTS["PP2"]
    flags = [*gpt_flags(STOPPED), *parallel, "--num-layers-per-virtual-pipeline-stage", "1", *SMALL]
    flags += ["--ckpt-format", "torch", "--save-interval", str(STOPPED)]
    stock = launch(megatron_lm, "pretrain_gpt.py", processes, [*flags, "--save", str(tmp_path / "stock")])
    auto = ["--evenpipe", "auto", "--memory-gib", "1", "--save", str(tmp_path / "auto")]
    ours = launch(megatron_lm, "pretrain_gpt.py", processes, [*flags, *auto])
    assert len(CHOICE.findall(ours.output)) == 1
    assert ours.lines == stock.lines
    last = f"iter_{STOPPED:07d}"
    assert differences(tmp_path / "stock" / last, tmp_path / "auto" / last) == []


def test_where_experts_messages_are_hidden_memory_decides_whether_partners_level_it(megatron_lm, tmp_path):
    """With `--overlap-moe-expert-parallel-comm` the order stays Megatron's; model chunks lie as for interleaving."""
    processes, parallel = LAYOUTS["PP4xVPP2"]
    flags = [*model_flags(megatron_lm, "pretrain_gpt.py", STOPPED, []), *parallel, *EXPERTS, *SMALL]
    flags += ["--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall", "--bf16"]
    flags += ["--overlap-moe-expert-parallel-comm", "--global-batch-size", "16", "--save-interval", str(STOPPED)]
    stock = launch(megatron_lm, "pretrain_gpt.py", 2 * processes, [*flags, "--save", str(tmp_path / "stock")])
    # The stock order needs 15.4 MiB, with BPipe 13.1.
    auto = ["--evenpipe", "auto", "--memory-gib", f"{14.2 / 2**10:.6f}", "--save", str(tmp_path / "auto")]
    ours = launch(megatron_lm, "pretrain_gpt.py", 2 * processes, [*flags, *auto])
    [(name, _, held)] = CHOICE.findall(ours.output)
    assert name == "interleaved with BPipe"
    assert float(held) <= 14.2
    assert "stock: interleaved: " in ours.output
    assert ours.lines == stock.lines
    last = f"iter_{STOPPED:07d}"
    assert differences(tmp_path / "stock" / last, tmp_path / "auto" / last) == []


def test_memory_that_holds_no_schedule_is_one_line(megatron_lm):
    processes, parallel = LAYOUTS["PP2"]
    flags = [*gpt_flags(3), *parallel, *SMALL, "--evenpipe", "auto", "--memory-gib", "0.005"]
    run = launch(megatron_lm, "pretrain_gpt.py", processes, flags, check=False)
    assert run.returncode != 0
    [line] = [line for line in run.output.splitlines() if line.startswith("evenpipe: error: ")]
    assert re.fullmatch(
        r"evenpipe: error: --memory-gib 0.005: no schedule fits: stage \d holds [\d.]+ MiB of weights, gradients, "
        r"optimizer and messages, and [\d.]+ MiB for one micro-batch: give at least 0.0\d+ GiB, .*",
        line,
    )
