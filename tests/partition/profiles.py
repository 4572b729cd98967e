"""Profiles of made-up models: random graphs, and chains of blocks like a transformer's; and problems of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from evenpipe.partition.dawnpiper.capuchin import Optimize
from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.dawnpiper.problem import Problem
from evenpipe.partition.profile import Node, Origin, Parameter, Profile, Storage

__all__ = ["PLENTY", "assembled", "origin", "problem_of", "random_profile", "transformer"]

MIB = 1 << 20
#: More bytes than any of these models takes.
PLENTY = 1 << 50


def problem_of(
    profile: Profile,
    workload: Workload | str,
    stages: int,
    limit: int = PLENTY,
    optimize: Optimize = "none",
    host_gbps: float = 0.0,
) -> Problem:
    """The problem of a profile; a schedule's name alone stands for four micro-batches of it."""
    if isinstance(workload, str):
        workload = Workload(workload, 4)
    return Problem.of(profile, workload, stages, limit, optimize, host_gbps)


def origin(model: str = "drawn", micro_batch_size: int = 1) -> Origin:
    return Origin(
        model=model,
        micro_batch_size=micro_batch_size,
        device="drawn",
        precision="fp32",
        source="drawn",
        digest=model,
        versions={},
    )


def assembled(
    times: Sequence[tuple[float, float]],
    storages: Sequence[Storage],
    parameters: Sequence[Parameter],
    allowed: Callable[[int], bool] = lambda node: True,
    layer_ends: Sequence[int] = (),
    micro_batch_size: int = 1,
) -> Profile:
    """A profile of which every node's bytes follow from storages and parameters, as a traced one's do."""
    count = len(times)
    activation, released, cut = [0] * count, [0] * count, [0] * count
    for one in storages:
        if one.producer >= 0:
            activation[one.producer] += one.nbytes
            end = max((one.producer, *one.users, *one.savers))
            for node in range(one.producer, end):
                cut[node] += one.nbytes
        if not one.savers and one.users:
            released[one.users[-1]] += one.nbytes
    own = [[0, 0, 0] for _ in range(count)]
    for parameter in parameters:
        for field, nbytes in enumerate((parameter.nbytes, parameter.gradient_bytes, parameter.optimizer_bytes)):
            own[parameter.users[0]][field] += nbytes
    nodes = tuple(
        Node(
            name=f"n{number}",
            forward_ms=forward,
            backward_ms=backward,
            activation_bytes=activation[number],
            parameter_bytes=own[number][0],
            gradient_bytes=own[number][1],
            optimizer_bytes=own[number][2],
            released_bytes=released[number],
            output_bytes=activation[number],
            cut_allowed=allowed(number) and number < count - 1,
            cut_bytes=cut[number] if number < count - 1 else 0,
        )
        for number, (forward, backward) in enumerate(times)
    )
    return Profile(
        origin=origin(micro_batch_size=micro_batch_size),
        nodes=nodes,
        storages=tuple(storages),
        parameters=tuple(parameters),
        layer_ends=tuple(layer_ends),
    )


def random_profile(seed: int, nodes: int = 12, *, cuts: float = 0.8) -> Profile:
    """Any graph: uneven times and bytes, storages saved near and far, parameters used in two places."""
    draw = random.Random(seed)
    times = [(draw.choice([0.0, draw.uniform(0.1, 3)]), draw.uniform(0, 6)) for _ in range(nodes)]
    storages = [
        Storage(
            nbytes=draw.randrange(1, 200),
            producer=producer,
            users=users,
            savers=tuple(
                sorted({*draw.sample(users, draw.randrange(len(users) + 1)), *draw.choice([(), (producer,)])})
            ),
        )
        for producer in range(nodes)
        for users in [_some(draw, range(producer + 1, nodes))]
        for _ in range(draw.randrange(1, 3))
    ]
    storages.append(Storage(nbytes=draw.randrange(1, 50), producer=-1, users=(0,), savers=_some(draw, range(nodes))))
    parameters = [
        Parameter(name=f"p{n}", nbytes=size, gradient_bytes=size, optimizer_bytes=2 * size, users=(n, *far))
        for n in range(0, nodes, 2)
        for size in [draw.randrange(1, 80)]
        for far in [_some(draw, range(n + 1, nodes)) if draw.random() < 0.2 else ()]
    ]
    open_cuts = [draw.random() < cuts for _ in range(nodes)]
    return assembled(times, storages, parameters, lambda node: open_cuts[node])


def _some(draw: random.Random, of: range) -> tuple[int, ...]:
    """Mostly the next, sometimes others."""
    chosen = {of[0]} if len(of) and draw.random() < 0.8 else set()
    return tuple(sorted(chosen | set(draw.sample(of, min(len(of), draw.choice([0, 0, 1, 2]))))))


#: One transformer block: (name, inputs by offset from this node, output in units of a hidden state, forward in units
#: of the cheapest product, whether backward needs its output itself, which of its inputs it needs).
_BLOCK = (
    ("norm1", (-1,), 1.0, 0.05, False, (0,)),
    ("qkv", (-1,), 3.0, 3.0, False, (0,)),
    ("scores", (-1,), 4.0, 1.0, False, (0,)),
    ("softmax", (-1,), 4.0, 0.2, True, ()),
    ("dropout", (-1,), 4.0, 0.2, False, ()),
    ("context", (-1, -4), 1.0, 1.0, False, (0, 1)),
    ("project", (-1,), 1.0, 1.0, False, (0,)),
    ("add1", (-1, -8), 1.0, 0.05, False, ()),
    ("norm2", (-1,), 1.0, 0.05, False, (0,)),
    ("fc1", (-1,), 4.0, 4.0, False, (0,)),
    ("gelu", (-1,), 4.0, 0.2, False, (0,)),
    ("fc2", (-1,), 1.0, 4.0, False, (0,)),
    ("add2", (-1, -5), 1.0, 0.05, False, ()),
)


def transformer(
    layers: int, *, hidden_mib: float = 8.0, weight_mib: float = 4.0, head: float = 8.0, micro_batch_size: int = 1
) -> Profile:
    """An embedding, `layers` blocks, and a tied head that takes `head` times a product, with much to save."""
    unit, weight = int(hidden_mib * MIB) * micro_batch_size, int(weight_mib * MIB)
    times, outputs, users, savers = [(0.1, 0.1)], [unit], [list[int]()], [list[int]()]
    parameters = []
    for _ in range(layers):
        for name, inputs, size, cost, saves_itself, needed in _BLOCK:
            at = len(times)
            times.append((cost * micro_batch_size, 2 * cost * micro_batch_size))
            outputs.append(int(size * unit))
            users.append([])
            savers.append([at] if saves_itself else [])
            for number, offset in enumerate(inputs):
                source = max(0, at + offset)
                users[source].append(at)
                if number in needed:
                    savers[source].append(at)
            if cost >= 1 and name not in ("scores", "context"):
                parameters.append(_parameter(f"{name}.{at}", int(cost * weight), (at,)))
    at = len(times)
    times.append((head * micro_batch_size, 2 * head * micro_batch_size))
    outputs.append(8 * unit)
    users.append([])
    savers.append([at])
    users[at - 1].append(at)
    savers[at - 1].append(at)
    parameters.append(_parameter("embedding", int(head * weight), (0, at)))
    storages = [
        Storage(nbytes=nbytes, producer=number, users=tuple(used), savers=tuple(sorted(set(saved))))
        for number, (nbytes, used, saved) in enumerate(zip(outputs, users, savers, strict=True))
    ]
    ends = [len(_BLOCK) * (layer + 1) for layer in range(layers)]
    return assembled(times, storages, parameters, layer_ends=ends, micro_batch_size=micro_batch_size)


def _parameter(name: str, nbytes: int, users: tuple[int, ...]) -> Parameter:
    return Parameter(name=name, nbytes=nbytes, gradient_bytes=nbytes, optimizer_bytes=2 * nbytes, users=users)
