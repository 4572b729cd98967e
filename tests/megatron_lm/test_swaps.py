"""Scripts that swap a share of what they save train to a stock run's bits, under a cap of its first stage's peak."""

import re
import shutil

import pytest

from tests.megatron_lm.launch import EXPERTS, LAYOUTS, differences, gpt_flags, launch

ITERATIONS, FIRST = 3, 2
#: Activations that outweigh the last stage's logits, so that the first stage is the worst.
SIZES = ("--vocab-size", "128", "--seq-length", "128", "--max-position-embeddings", "128", "--hidden-size", "128")
#: Of each share the part of 1F1B's peak that is left on the first of four stages, which has two micro-batches whole.
CAPS = {"0.5": 0.75, "0.8": 0.6}


def saved_mib(run) -> float:
    """The worst stage's, in the last iteration that was logged."""
    return max(map(float, re.findall(r"peak saved MiB: ([\d. ]+) \|", run.output)[-1].split()))


@pytest.mark.parametrize("model", ["GPT", pytest.param("experts", marks=pytest.mark.long)])
def test_swaps_train_to_the_same_bits_under_a_cap(megatron_lm, model, tmp_path):
    processes, parallel = LAYOUTS["PP4"]
    flags = [*gpt_flags(ITERATIONS), *SIZES, *parallel, "--bf16", *(EXPERTS if model == "experts" else ())]
    flags += ["--save-interval", str(ITERATIONS), "--ckpt-format", "torch"]
    stock = launch(megatron_lm, "pretrain_gpt.py", processes, [*flags, "--save", str(tmp_path / "stock")])
    assert len(stock.lines) == ITERATIONS
    whole = launch(megatron_lm, "pretrain_gpt.py", processes, [*flags, "--evenpipe-schedule", "1f1b"])
    last = f"iter_{ITERATIONS:07d}"
    for share, cap in CAPS.items():
        folder = tmp_path / share
        ours = ["--evenpipe-swap", share, "--save", str(folder)]
        run = launch(megatron_lm, "pretrain_gpt.py", processes, [*flags, *ours])
        assert run.lines == stock.lines
        assert run.validation == stock.validation
        assert differences(tmp_path / "stock" / last, folder / last) == []
        assert run.peak_live == [4, 3, 2, 1]
        assert saved_mib(run) <= (cap + 0.02) * saved_mib(whole)
        assert re.search(r"stage 0 keeps \d+\.\d MiB of its host's memory, pinned, for what it swaps: ", run.output)


#: Before 0.16, mock data have tokens up to this length, whatever the vocabulary: logits then outweigh more.
OLD_MOCK_DATA = ("--vocab-size", "4224", *SIZES[2:])
OLD_LEAST_CAP = 0.85
#: Four stages whose parts differ in size.
UNEVEN = ("--pipeline-model-parallel-layout", "Ett|ttt|tt|tL")
MODELS = {"GPT": (), "experts": EXPERTS, "uneven layout": UNEVEN}
ENOUGH_GIB = 100


def by_stage(run, what: str) -> list[float]:
    """The numbers of the last line that has `what` before them."""
    return [float(number) for number in re.findall(rf"{what}: ([\d. ]+)", run.output)[-1].split()]


@pytest.mark.parametrize(
    ("model", "caps"),
    [
        ("GPT", (0.6,)),
        *(pytest.param(model, (0.9, 0.75, 0.6, 0.45), marks=pytest.mark.long) for model in MODELS),
    ],
)
def test_stages_stay_under_a_cap_and_train_to_the_same_bits(megatron_lm, model, caps, tmp_path):
    """Of what the worst stage holds under 1F1B."""
    processes, parallel = LAYOUTS["PP4"]
    sizes = SIZES
    if "eod_token = tokenizer.eod" not in (megatron_lm / "megatron/core/datasets/gpt_dataset.py").read_text():
        sizes, caps = OLD_MOCK_DATA, [cap for cap in caps if cap > OLD_LEAST_CAP] or [OLD_LEAST_CAP]
    flags = [*gpt_flags(ITERATIONS), *sizes, *parallel, "--bf16", *MODELS[model]]
    flags += ["--save-interval", str(FIRST), "--ckpt-format", "torch"]
    stock = launch(megatron_lm, "pretrain_gpt.py", processes, [*flags, "--save", str(tmp_path / "stock")])
    assert len(stock.lines) == ITERATIONS
    swaps = [*flags, "--evenpipe-swap", "auto", "--memory-gib"]
    whole = launch(megatron_lm, "pretrain_gpt.py", processes, [*swaps, str(ENOUGH_GIB)])
    assert whole.lines == stock.lines
    peak = max(by_stage(whole, "peak saved MiB"))
    used = ENOUGH_GIB * 1024 - min(by_stage(whole, "nothing is swapped, for all fits; .* MiB by stage"))
    last = f"iter_{ITERATIONS:07d}"
    for cap in caps:
        folder = tmp_path / str(cap)
        under = [*swaps, str((used + cap * peak) / 1024), "--save", str(folder)]
        run = launch(megatron_lm, "pretrain_gpt.py", processes, under)
        assert run.lines == stock.lines
        assert differences(tmp_path / "stock" / last, folder / last) == []
        rooms = by_stage(run, "room for all of them, MiB")
        assert min(rooms) == pytest.approx(cap * peak, rel=0.02)
        assert all(held <= 1.02 * room for held, room in zip(by_stage(run, "peak saved MiB"), rooms, strict=True))
    # Iterations that were trained by then are trained again, to the same bits.
    shutil.copytree(folder / f"iter_{FIRST:07d}", tmp_path / "first" / f"iter_{FIRST:07d}")
    (tmp_path / "first" / "latest_checkpointed_iteration.txt").write_text(str(FIRST))
    resumed = launch(megatron_lm, "pretrain_gpt.py", processes, [*under, "--load", str(tmp_path / "first")])
    assert f"checkpoint of iteration {FIRST}: trains by the plan that was saved" in resumed.output
    assert "room for all of them" not in resumed.output
    assert resumed.lines[-1] == stock.lines[-1]
    assert differences(tmp_path / "stock" / last, folder / last) == []
    held = [float(mib) for mib in re.findall(r"peak saved MiB: ([\d. ]+) \|", resumed.output)[0].split()]
    assert held == pytest.approx(by_stage(run, "peak saved MiB"), rel=0.02)
    refused = launch(megatron_lm, "pretrain_gpt.py", processes, [*swaps, str((used + 0.01 * peak) / 1024)], check=False)
    assert re.search(
        r"no swaps( or recomputed layers)? keep stage \d under it: .*: give at least [\d.]+ GiB", refused.output
    )
