"""A cut model trains as the uncut one does in one process, with the same micro-batches in the same order.

Bit for bit in fp32, but where additions come in another order: gradients of parameters that several stages use (token
embeddings of GPT-2, BERT and T5) are summed over micro-batches before they are over stages, and a concatenation's
gradients (AmoebaNet) are slices in one stage and copies in two.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.job_server import HUGGING_FACE, run_script

UNTIED = "gpt2 with weights of its own for the output"
#: Name, micro-batches, chunks, group size, BPipe.
SCHEDULES: dict[str, list[Any]] = {
    "1f1b": ["1f1b", 6, 1, 1, False],
    "gpipe": ["gpipe", 6, 1, 1, False],
    "kfkb": ["kfkb", 6, 1, 2, False],
    "zb-h1": ["zb-h1", 6, 1, 1, False],
    "2bw": ["2bw", 6, 1, 1, False],
}
#: What moves most: activations to partner stages, and chunks back and forth.
MOVING: dict[str, list[Any]] = {
    "1f1b, BPipe": ["1f1b", 6, 1, 1, True],
    "kfkb, BPipe": ["kfkb", 8, 1, 2, True],
    "2bw, BPipe": ["2bw", 6, 1, 1, True],
    "interleaved": ["interleaved", 8, 2, 1, False],
    "v-half": ["v-half", 6, 2, 1, False],
}
long = pytest.mark.long


class Trained:
    """What a job of `cases.py` left in its folder."""

    def __init__(
        self, folder: Path, model: str, stages: int, dtype: str, workloads: dict[str, list[Any]], **more: Any
    ) -> None:
        case = {"model": model, "stages": stages, "dtype": dtype, "workloads": workloads, **more}
        (folder / "case.json").write_text(json.dumps(case))
        done = run_script(HUGGING_FACE, Path(__file__).with_name("cases.py"), folder)
        assert done.returncode == 0, done.stderr
        self.uncut = torch.load(folder / "uncut.pt")
        self.ranks = [torch.load(folder / f"rank-{rank}.pt") for rank in range(stages)]
        self.workloads = workloads

    def pairs(self, name: str) -> list[tuple[str, Tensor, Tensor]]:
        """What is compared: of the cut model, and of the uncut one."""
        schedule, micro_batches, *_ = self.workloads[name]
        whole, ranks = self.uncut[f"{schedule == '2bw'}, {micro_batches}"], [rank[name] for rank in self.ranks]
        [losses] = [rank["losses"] for rank in ranks if rank["losses"][0] is not None]
        found = [(f"loss {step}", *both) for step, both in enumerate(zip(losses, whole["losses"], strict=True))]
        if schedule != "2bw":  # whose gradients nobody is shown
            assert {key for rank in ranks for key in rank["gradients"]} == set(whole["gradients"])
        found += [
            (f"gradient of {key}", one, whole["gradients"][key])
            for rank in ranks
            for key, one in rank["gradients"].items()
        ]
        assert list(ranks[0]["state"]) == list(whole["state"])
        return [*found, *((key, one, whole["state"][key]) for key, one in ranks[0]["state"].items())]


@pytest.mark.parametrize(
    ("stages", "workloads"),
    [
        (4, {name: (SCHEDULES | MOVING)[name] for name in ("1f1b", "zb-h1", "kfkb, BPipe", "2bw, BPipe")}),
        pytest.param(4, SCHEDULES | MOVING, marks=long),
        pytest.param(2, SCHEDULES, marks=long),
    ],
)
def test_without_ties_all_is_bit_for_bit(tmp_path: Path, stages: int, workloads: dict[str, list[Any]]) -> None:
    """Losses, the first gradients, and weights after five steps, with dropout."""
    trained = Trained(tmp_path, UNTIED, stages, "float32", workloads)
    for name in workloads:
        for what, cut, uncut in trained.pairs(name):
            assert torch.equal(cut, uncut), f"{name}: {what}"


@long
@pytest.mark.parametrize("model", ["gpt2-large", "bert-large", "t5-large"])
def test_in_fp32_all_but_the_tied_gradient_is_bit_for_bit(tmp_path: Path, model: str) -> None:
    """Before the first step, which makes the difference one of all weights; and copies of a parameter stay equal."""
    trained = Trained(tmp_path, model, 2, "float32", SCHEDULES)
    for name in SCHEDULES:
        own = [rank[name]["own"] for rank in trained.ranks]
        [tied] = [
            key for key in set(own[0]) & set(own[1]) if own[0][key].is_floating_point() and own[0][key].dim() == 2
        ]
        assert torch.equal(own[0][tied], own[1][tied])
        pairs = [pair for pair in trained.pairs(name) if pair[0] == "loss 0" or pair[0].startswith("gradient of ")]
        assert [what for what, cut, uncut in pairs if not torch.equal(cut, uncut)] in ([], [f"gradient of {tied}"] * 2)


@long
@pytest.mark.parametrize("model", [UNTIED, "gpt2-large", "bert-large", "t5-large"])
@pytest.mark.parametrize("optimize", ["recompute", "swap+recompute"])
def test_what_is_recomputed_and_swapped_is_what_would_have_been_kept(tmp_path: Path, model: str, optimize: str) -> None:
    """Bit for bit that of the same cuts, in three quarters of the memory; with BPipe, and backwards in halves."""
    workloads = {name: (SCHEDULES | MOVING)[name] for name in ("1f1b, BPipe", "zb-h1", "2bw", "2bw, BPipe")}
    trained = Trained(tmp_path, model, 4, "float32", workloads, optimize=optimize, share=0.75, gbps=0.01)
    did = set()
    for name in workloads:
        plan = json.loads((tmp_path / f"{name}.json").read_text())
        did |= {key for part in plan["stages"] for key in ("recompute", "swap_storages") if part[key]}
        for rank in trained.ranks:
            kept = rank[f"{name}, all kept"]
            for what in ("gradients", "own"):
                assert rank[name][what].keys() == kept[what].keys()
                assert all(torch.equal(one, kept[what][key]) for key, one in rank[name][what].items()), (name, what)
            assert rank[name]["losses"] == kept["losses"]
    assert did
