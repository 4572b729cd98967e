"""The line of a launcher and a script: found among the words, started through EvenPipe, and quoted for a shell."""

from __future__ import annotations

import shlex

import pytest

from evenpipe.recipes.line import read_line

HOSTILE = "it's $(touch owned)`\n"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("torchrun --nnodes 2 pretrain_gpt.py", "torchrun --nnodes 2 -m evenpipe run pretrain_gpt.py"),
        ("srun python -u pretrain_gpt.py", "srun python -u -m evenpipe run pretrain_gpt.py"),
        ("srun pretrain_gpt.py", "srun python -m evenpipe run pretrain_gpt.py"),
        (
            "python -m torch.distributed.run a/pretrain_gpt.py",
            "python -m torch.distributed.run -m evenpipe run a/pretrain_gpt.py",
        ),
        (
            "deepspeed --num_gpus 8 pretrain_gpt.py",
            "deepspeed --no_local_rank --num_gpus 8 --module evenpipe run pretrain_gpt.py",
        ),
        ("torchrun -m evenpipe run pretrain_gpt.py --bpipe", "torchrun -m evenpipe run pretrain_gpt.py --bpipe"),
    ],
)
def test_every_launcher_starts_it_through_evenpipe(line: str, wanted: str) -> None:
    found = read_line(line.split())
    assert found is not None
    assert found.by_evenpipe().command == wanted


def test_hostile_words_come_out_as_they_went_in() -> None:
    words = [f"A={HOSTILE}", "torchrun", "pretrain_gpt.py", "--data-path", HOSTILE, "--lr", "-1"]
    found = read_line(words)
    assert found is not None
    assert shlex.split(found.command) == words
    assert shlex.split(" ".join(found.lines)) == words
    assert found.variable("A") == HOSTILE


@pytest.mark.parametrize("line", ["", "torchrun --nproc-per-node 8", "torchrun -m train.py"])
def test_a_line_without_a_script(line: str) -> None:
    assert read_line(line.split()) is None
