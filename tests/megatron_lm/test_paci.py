"""PACI in unmodified scripts: the first step is stock's, and a resumed run goes on as the run that only saved."""

import re
from pathlib import Path

import pytest

from tests.megatron_lm.launch import Run, differences, launch, model_flags

GPT = "pretrain_gpt.py"
STEPS = ("--pipeline-model-parallel-size", "2", "--untie-embeddings-and-output-weights", "--clip-grad", "0")
PACI = ("--evenpipe-schedule", "paci")


def losses(run: Run) -> list[str]:
    return [re.search(r"lm loss: \S+", line)[0] for line in run.lines]


def test_steps_in_place_are_saved_and_gone_on_with(megatron_lm: Path, tmp_path: Path) -> None:
    flags = [*model_flags(megatron_lm, GPT, 4, ()), *STEPS, "--eval-interval", "1000", "--ckpt-format", "torch"]

    def run(folder: str, *more: str) -> Run:
        return launch(megatron_lm, GPT, 2, [*flags, "--save", str(tmp_path / folder), "--save-interval", "2", *more])

    stock, whole = (
        run("stock", "--save-interval", "1", "--exit-interval", "1"),
        run("paci", *PACI, "--save-interval", "1"),
    )
    found = differences(tmp_path / "stock" / "iter_0000001", tmp_path / "paci" / "iter_0000001")
    assert all(name.startswith("evenpipe_2bw/") for name in found), found
    assert losses(stock) == losses(whole)[:1]
    kept = tmp_path / "paci"
    resumed = run("resumed", *PACI, "--save-interval", "1", "--load", str(kept), "--ckpt-step", "2")
    # Megatron's second line has a mean since the start of the run.
    assert (len(resumed.lines), losses(resumed)[0]) == (2, losses(whole)[2])
    assert not differences(kept / "iter_0000004", tmp_path / "resumed" / "iter_0000004")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (STEPS[:3], "--clip-grad decides a step by all stages' gradients"),
        ((*STEPS[:2], *STEPS[3:]), "--untie-embeddings-and-output-weights False ties a weight over stages"),
    ],
)
def test_what_waits_for_other_stages_is_refused_in_one_line(
    megatron_lm: Path, flags: tuple[str, ...], said: str
) -> None:
    run = launch(megatron_lm, GPT, 2, [*model_flags(megatron_lm, GPT, 2, ()), *flags, *PACI], check=False)
    assert run.returncode != 0
    [line] = {line for line in run.output.splitlines() if said in line}
    assert line.endswith("or use 2bw")
