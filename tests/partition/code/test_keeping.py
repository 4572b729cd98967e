"""What a plan says that a part recomputes and swaps is what it does: the same gradients, and the bytes that it says."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from evenpipe.partition.code.keeping import keeping_of
from evenpipe.partition.costs.storages import Graph as Ranges
from evenpipe.partition.costs.storages import Saved
from evenpipe.partition.dawnpiper.capuchin import Around, Fit, Load, Optimize, fit
from evenpipe.partition.models import Example
from evenpipe.partition.profile import Profile
from evenpipe.partition.profiling import profile
from evenpipe.partition.search.plan import Stage
from evenpipe.partition.timing import Roofline
from evenpipe.partition.trace import Graph
from evenpipe.planner.descriptions import device
from evenpipe.runtime.recompute_swap import PLAIN_CALLER, Keeper, Keeping, NodeCaller
from evenpipe.runtime.store import ActivationStore

MODELS = ["bert-large", "gpt2-large", "t5-large", "amoebanet-d"]
HOST = torch.device("cpu")


@contextlib.contextmanager
def numbers_of(ordinal: int) -> Iterator[None]:
    with torch.random.fork_rng([]):
        torch.manual_seed(ordinal)
        yield


def part_of(made: Profile, found: Fit) -> Stage:
    """The whole model as a stage."""
    names = [node.name for node in made.nodes]
    return Stage(
        stage=0,
        first_node=0,
        last_node=len(names) - 1,
        forward_ms=0.0,
        backward_ms=0.0,
        extra_ms=found.extra_ms,
        peak_bytes_before=0,
        peak_bytes=0,
        recompute=tuple(names[node] for node in found.recompute),
        swap_storages=found.swap,
        drop_storages=found.drop,
    )


class OnCpu(Roofline):
    """A GPU's times, with the bytes of the kernels that run here."""

    device_type = "cpu"


class Run:
    """One micro-batch of a whole model, node by node."""

    def __init__(self, graph: Graph, example: Example, keeping: Keeping | None = None) -> None:
        model = example.model
        model.zero_grad()
        held: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        self.store = ActivationStore((*model.parameters(), *model.buffers()), device=HOST)
        counter = self.store.counter
        keeper = Keeper(self.store, HOST)
        with self.store.recording(0):
            if keeping is None:
                loss = self._forward(graph, example, held, keeping or Keeping(), PLAIN_CALLER)
            else:
                with keeper.forward(0, keeping, numbers_of) as keep:
                    loss = self._forward(graph, example, held, keeping, keep)
                del keep
        keeper.swap_out(0)
        self.kept = counter.own_bytes
        self.loss = loss.detach()
        keeper.swap_in(0)
        loss.backward()
        del loss
        self.store.assert_empty()
        self.peak = counter.peak_bytes
        self.gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        self.buffers = {name: one.clone() for name, one in model.named_buffers()}

    def _forward(
        self, graph: Graph, example: Example, held: dict[str, Any], keeping: Keeping, keep: NodeCaller
    ) -> Tensor:
        env: dict[fx.Node, Any] = {}
        for node in graph.module.graph.nodes:
            if node.op == "placeholder":
                env[node] = example.inputs[node.target]
            elif node.op == "get_attr":
                env[node] = held[node.target] if node.target in held else operator.attrgetter(node.target)(graph.module)
        for number, node in enumerate((*graph.prefix, *graph.nodes), -len(graph.prefix)):
            args, kwargs = fx.map_arg(node.args, env.__getitem__), fx.map_arg(node.kwargs, env.__getitem__)
            with numbers_of(number) if graph.observed[node].random else contextlib.nullcontext():
                call = (keep, number, node.target) if number in keeping.nodes else (node.target,)
                env[node] = call[0](*call[1:], *args, **kwargs)
        return env[next(node for node in graph.module.graph.nodes if node.op == "output").args[0]]


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def whole(small: Any, name: str) -> tuple[Example, Graph, Profile, Saved]:
    example, graph = small(name)
    made = profile(graph, OnCpu(device("a100-40gb")), name)
    return example, graph, made, Ranges(made).saved(0, len(made.nodes))


#: How, in what part of the memory, and over what link (10^9 bytes/s) beside how many ms.
WAYS: list[tuple[Optimize, float, float, float]] = [
    ("recompute", 0.5, 0.0, 0.0),
    ("swap+recompute", 0.5, 1e3, 3.0),
    ("swap+recompute", 0.4, 0.5, 0.05),
]


@pytest.mark.parametrize(
    "name", [name if name == "bert-large" else pytest.param(name, marks=pytest.mark.long) for name in MODELS]
)
def test_what_is_recomputed_and_swapped_leaves_every_bit_and_holds_the_bytes_that_were_planned(small, name) -> None:
    example, graph, made, saved = whole(small, name)
    before = {key: value.clone() for key, value in example.model.named_buffers()}
    plain = Run(graph, example)
    assert plain.kept == saved.total
    done = set[str]()
    for optimize, share, gbps, between_ms in WAYS:
        loads = [Load(1, share * saved.total)]
        found = fit(saved.graph, 0, len(made.nodes), loads, optimize, gbps, Around(between_ms))
        assert found is not None
        done |= {"recompute"} if found.recompute else set()
        done |= {"swap"} if found.swap else set()
        done |= {"both"} if found.swap and found.recompute else set()
        for key, value in example.model.named_buffers():
            value.copy_(before[key])

        ordinals = {number: number for number, node in enumerate(made.nodes) if node.random}
        keeping = keeping_of(made, part_of(made, found), gbps, range(len(made.nodes)), ordinals)
        run = Run(graph, example, keeping)

        assert torch.equal(run.loss, plain.loss)
        assert equal(run.gradients, plain.gradients)
        assert equal(run.buffers, plain.buffers), "what a node changes, it changes once"
        leaving = keeping.swapped.difference(*keeping.gone.values())
        assert run.kept == found.kept + sum(made.storages[number].nbytes for number in leaving)
        assert run.peak == pytest.approx(found.kept + found.transient, rel=0.03)
    assert done == {"recompute", "swap", "both"}


def test_a_plan_on_a_profile_of_other_kernels_is_refused(small) -> None:
    example, graph = small("bert-large")
    made = profile(graph, Roofline(device("a100-40gb")), "bert-large")
    saved = Ranges(made).saved(0, len(made.nodes))
    found = fit(saved.graph, 0, len(made.nodes), [Load(1, 0.7 * saved.total)], "recompute")
    assert found is not None
    ordinals = {number: number for number, node in enumerate(made.nodes) if node.random}
    with pytest.raises(RuntimeError, match="make a plan on a profile of this device"):
        Run(graph, example, keeping_of(made, part_of(made, found), 0.0, range(len(made.nodes)), ordinals))
