"""Parts whose plan recomputes and swaps: what the same parts compute without, in the bytes that were planned."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from evenpipe.descriptions import device
from evenpipe.partition.dawnpiper.capuchin import Around, Fit, Load, Optimize, fit
from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.dawnpiper.problem import Problem
from evenpipe.partition.models import Example
from evenpipe.partition.profile import Profile
from evenpipe.partition.profiling import profile
from evenpipe.partition.search.plan import plan_of
from evenpipe.partition.timing import Roofline
from evenpipe.partition.trace import Graph, trace
from evenpipe.runtime.recompute_swap import Keeper
from evenpipe.runtime.store import ActivationStore
from evenpipe.stage_code import Draws, Part, StageCodeError, users_lines
from tests.partition.code.cut import SEED, batches, drawn_cuts, profiled, written

STAGES = 2
HOST = torch.device("cpu")
#: How, to what share of its bytes, and over what link (10^9 bytes/s).
WAYS: list[tuple[Optimize, float, float]] = [
    ("recompute", 0.6, 0.0),
    ("swap+recompute", 0.6, 1e3),
    ("swap+recompute", 0.6, 0.5),
]


class OnCpu(Roofline):
    """A GPU's times, with the bytes of the kernels that run here."""

    device_type = "cpu"


def profiled_here(example: Example, graph: Graph) -> Profile:
    return profile(graph, OnCpu(device("a100-40gb")), example.name)


class Stages:
    """Parts one after the other, each with a store of its own, as stages in processes have."""

    def __init__(self, example: Example, parts: Sequence[Part]) -> None:
        self.example, self.parts = example, parts
        self.stores = [ActivationStore([*part.parameters(), *part.buffers()], device=HOST) for part in parts]
        self.keepers = [Keeper(store, HOST) for store in self.stores]
        self.kept: list[int] = []

    def step(self, number: int, inputs: Mapping[str, Tensor]) -> Tensor:
        """A micro-batch's loss; it leaves its gradients."""
        received: tuple[Tensor, ...] = ()
        sent, got = list[tuple[Tensor, ...]](), list[tuple[Tensor, ...]]()
        for part, store, keeper in zip(self.parts, self.stores, self.keepers, strict=True):
            got.append(received)
            with store.recording(number), keeper.forward(number, part.KEEPING, Draws(SEED, number)) as keep:
                sent.append(
                    part({name: inputs[name] for name in part.INPUTS}, Draws(SEED, number), *received, keep=keep)
                )
            del keep
            received = tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in sent[-1])
            keeper.swap_out(number)
        self.kept = [store.counter.own_bytes for store in self.stores]
        loss = sent[-1][0].detach()
        gradients: list[Tensor | None] = [None]
        del received
        for keeper in reversed(self.keepers):
            keeper.swap_in(number)
            mine, given = sent.pop(), got.pop()
            pairs = [(out, back) for out, back in zip(mine, gradients, strict=True) if out.requires_grad]
            torch.autograd.backward([out for out, _ in pairs], [back for _, back in pairs])
            gradients = [tensor.grad for tensor in given]
            del mine, pairs, given
        for store in self.stores:
            store.assert_empty()
        return loss

    def train(self, given: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        model = self.example.model
        model.zero_grad()
        found = {f"loss {number}": self.step(number, inputs) for number, inputs in enumerate(given)}
        found |= {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        return found | {name: one.clone() for name, one in model.named_buffers()}


def made(
    example: Example, graph: Graph, found: Profile, cuts: Sequence[int], path: Path, way: tuple[Optimize, float, float]
) -> tuple[list[Fit], list[Part]]:
    """What each part does to keep that share of its bytes, and its code."""
    optimize, share, gbps = way
    workload = Workload("1f1b", 2 * STAGES)
    problem = Problem.of(found, workload, STAGES, 1 << 50, optimize, gbps)
    starts = [0, *(cut + 1 for cut in cuts), len(found.nodes)]
    fits = []
    for start, stop in pairwise(starts):
        total = problem.graph.saved(start, stop).total
        loads = [Load(1, of * total) for of in (share, 1.0)]
        found_fits = (fit(problem.graph, start, stop, [load], optimize, gbps, Around(0.3)) for load in loads)
        fits.append(next(one for one in found_fits if one is not None))  # what is small may not shrink so far
    bounds = [0, *(problem.costs.starts.tolist().index(cut + 1) for cut in cuts), problem.costs.last]
    plan = plan_of(problem, bounds, fits, workload)
    return fits, written(example, graph, plan, found, path)


@pytest.mark.parametrize(
    "name", ["bert-large", "gpt2-large", "t5-large", pytest.param("amoebanet-d", marks=pytest.mark.long)]
)
def test_parts_that_recompute_and_swap_train_bit_for_bit_in_the_planned_bytes(small, tmp_path, name):
    """To 3 %, or to one tensor of so small a model: a part runs in the model's own order, and is weighed by depth."""
    example, graph = small(name)
    found = profiled_here(example, graph)
    given = batches(example, 2)
    before = {key: value.clone() for key, value in example.model.state_dict().items()}
    did = set[str]()
    for seed in (1, 2):
        cuts = drawn_cuts(graph, STAGES - 1, seed)
        _, parts = made(example, graph, found, cuts, tmp_path / "plan.json", ("none", 1.0, 0.0))
        assert not any(part.KEEPING.nodes for part in parts)
        plain = {key: value.clone() for key, value in Stages(example, parts).train(given).items()}
        for way in WAYS:
            example.model.load_state_dict(before)
            fits, parts = made(example, graph, found, cuts, tmp_path / "plan.json", way)
            stages = Stages(example, parts)

            kept = stages.train(given)

            assert kept.keys() == plain.keys()
            for key, value in plain.items():
                assert torch.equal(kept[key], value), (way, key)
            for one, part, nbytes, store in zip(fits, parts, stages.kept, stages.stores, strict=True):
                did |= {"recompute"} if part.KEEPING.again else set()
                did |= {"swap"} if part.KEEPING.swapped else set()
                did |= {"both"} if part.KEEPING.swapped and part.KEEPING.again else set()
                leaving = set(part.KEEPING.swapped).difference(*part.KEEPING.gone.values())
                assert nbytes == one.kept + sum(found.storages[number].nbytes for number in leaving), way
                planned, tensor = one.kept + one.transient, max(storage.nbytes for storage in found.storages)
                assert abs(store.counter.peak_bytes - planned) <= max(0.03 * planned, tensor), (cuts, way)
        example.model.load_state_dict(before)
    assert did == {"recompute", "swap", "both"}


def test_a_plan_on_a_profile_of_other_kernels_is_refused(small, tmp_path):
    example, graph = small("bert-large")
    cuts, way = drawn_cuts(graph, STAGES - 1, 1), ("recompute", 0.7, 0.0)
    _, parts = made(example, graph, profiled(example, graph), cuts, tmp_path / "plan.json", way)
    with pytest.raises(RuntimeError, match="make a plan on a profile of this device"):
        Stages(example, parts).step(0, example.inputs)


class InPlace(nn.Module):
    """What `first` makes is read, changed twice, and read again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        other = self.middle((hidden * 2).tanh())
        hidden.add_(other).relu_()
        return self.last(nn.functional.gelu(hidden + other)).square().sum()


def test_what_is_changed_in_place_is_kept_as_it_is(tmp_path):
    example = Example("in place", InPlace(), {"x": torch.ones(16, 32)})
    graph = trace(example.model, example.inputs)
    found = profiled_here(example, graph)
    given = batches(example, 2)
    cuts = drawn_cuts(graph, STAGES - 1, 1)
    changed = {number for number, one in enumerate(found.storages) if one.changers}
    assert changed
    _, parts = made(example, graph, found, cuts, tmp_path / "plan.json", ("none", 1.0, 0.0))
    plain = {key: value.clone() for key, value in Stages(example, parts).train(given).items()}
    did = 0
    for way in (("recompute", 0.85, 0.0), ("swap+recompute", 0.85, 1e3), ("swap+recompute", 0.7, 1e3)):
        fits, parts = made(example, graph, found, cuts, tmp_path / "plan.json", way)
        did += sum(bool(one.swap or one.drop) for one in fits)
        assert changed.isdisjoint(number for one in fits for number in (*one.swap, *one.drop))
        kept = Stages(example, parts).train(given)
        assert all(torch.equal(kept[key], value) for key, value in plain.items()), way
    assert did


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(32))
        self.last = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        moved = x + self.shift
        return self.last(nn.functional.gelu(moved)).square().sum()


def shifted(path: Path, fits_of: Callable[[int], tuple[Fit, Fit]]) -> tuple[Example, list[Part]]:
    """It and its parts, cut behind its first linear layer; `fits_of` is told the storage that the first node makes."""
    example = Example("shifted", Shifted(), {"x": torch.ones(64, 32)})
    graph = trace(example.model, example.inputs)
    found = profiled_here(example, graph)
    cut = next(number for number, name in enumerate(graph.names) if "linear" in name)
    workload = Workload("1f1b", 2 * STAGES)
    problem = Problem.of(found, workload, STAGES, 1 << 50)
    first = next(number for number, one in enumerate(found.storages) if one.producer == 0)
    bounds = [0, problem.costs.starts.tolist().index(cut + 1), problem.costs.last]
    return example, written(example, graph, plan_of(problem, bounds, fits_of(first), workload), found, path)


def test_a_swap_of_what_a_stage_does_not_have_is_refused(tmp_path):
    with pytest.raises(StageCodeError, match=r"stage 1 is to swap what .*add.* makes on another one"):
        shifted(tmp_path / "plan.json", lambda first: (Fit(0.0, 0, 0), Fit(0.0, 0, 0, swap=(first,))))


def test_an_error_where_an_operation_runs_again_names_the_users_own_line(tmp_path):
    """What it reads has been changed since the forward."""

    def dropped(first: int) -> tuple[Fit, Fit]:
        return Fit(0.0, 0, 0, recompute=(0,), drop=(first,)), Fit(0.0, 0, 0)

    example, parts = shifted(tmp_path / "plan.json", dropped)
    stages, given = Stages(example, parts), torch.ones(64, 32)
    store, keeper = stages.stores[0], stages.keepers[0]
    with store.recording(0), keeper.forward(0, parts[0].KEEPING, Draws(SEED, 0)) as keep:
        (sent,) = parts[0]({"x": given}, Draws(SEED, 0), keep=keep)
    del keep
    given.add_(1)
    with pytest.raises(RuntimeError, match="modified in place") as caught, users_lines(parts[0]):
        sent.sum().backward()
    assert re.match(rf"{Path(__file__)}:\d+: `moved = x \+ self.shift`: ", str(caught.value))
