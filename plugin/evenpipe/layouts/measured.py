"""Times of the nodes of one transformer layer of each kind, and of what is before and behind them, on this CPU."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import pairwise
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module

from evenpipe.layouts.gpt import Gpt, LayoutError
from evenpipe.layouts.layers import Time, kinds, nodes_of
from evenpipe.partition.counting import on_saved
from evenpipe.planner.operations.operation import FusedAttention, Gemm, total

__all__ = ["measured"]

_WARM_UP: Final = 2
_MS: Final = 1e3
_REPEATS: Final = 7
_MOST_FLOPS: Final = 5e11  # of a forward: with its backward, nine times, a few minutes on a slow machine
_MOST_PARAMETERS: Final = 1e9  # 8 GB with their gradients
_MODULES: Final = {
    "input_norm": "input_layernorm",
    "qkv": "self_attention.linear_qkv",
    "core_attention": "self_attention.core_attention",
    "projection": "self_attention.linear_proj",
    "mlp_norm": "pre_mlp_layernorm",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
    "router": "mlp.router",
    "experts": "mlp.experts",
}


def measured(gpt: Gpt, build: Callable[[], tuple[Module, dict[str, Module]]]) -> dict[str, dict[str, Time]]:
    """Return milliseconds and saved bytes of the nodes of one layer of each kind, by kind, by node.

    `build` makes a model with one layer of each kind, and its parts by kind, in order. Raises LayoutError if it would
    take too long.
    """
    operations = [one for kind in kinds(gpt) for node in nodes_of(gpt, kind).values() for one in node]
    works = (work for one in operations for work in one.forward)
    flops = sum(work.flops for work in works if isinstance(work, Gemm | FusedAttention))
    parameters = total(operations).all
    if flops > _MOST_FLOPS or parameters > _MOST_PARAMETERS or gpt.run.context > 1:
        raise LayoutError(
            f"one layer of each kind ({flops / 1e12:.1f} × 10^12 operations, {parameters / 1e9:.1f} × 10^9 parameters) "
            f"cannot be timed on this CPU: at most {_MOST_FLOPS / 1e12} and {_MOST_PARAMETERS / 1e9:.0f} can, without "
            "context parallelism: name a device whose peaks to take"
        )
    model, parts = build()
    sequence = gpt.model.sequence
    tokens = torch.randint(gpt.model.vocabulary, (gpt.run.micro_batch, sequence))
    places = torch.arange(sequence).expand_as(tokens)
    mask = torch.ones(1, 1, sequence, sequence).tril() < 0.5

    def forward() -> torch.Tensor:
        return model(tokens, places, mask, labels=tokens).float().mean()  # type: ignore[no-any-return]

    modules = {f"{kind}.{name}": node for kind, part in parts.items() for name, node in _nodes(kind, part).items()}
    found: dict[str, dict[str, Time]] = {}
    for name, taken in _timed(model, forward, modules, last="loss.loss").items():
        kind, _, node = name.partition(".")
        found.setdefault(kind, {})[node] = taken
    return found


def _nodes(kind: str, part: Module) -> dict[str, Module]:
    """Return the modules of a transformer layer that are timed, in order; what follows them is its end."""
    if kind not in ("dense", "experts"):
        return {kind: part}
    known = dict(part.named_modules())
    return {node: known[path] for node, path in _MODULES.items() if path in known} | {"end": part}


def _timed(model: Module, forward: Callable[[], Tensor], parts: Mapping[str, Module], last: str) -> dict[str, Time]:
    """Medians over some forwards and backwards on one core of a CPU, those that warm up left out.

    Milliseconds are this thread's, which backwards on a CPU run in too, so that other processes do not count.
    `parts` are called in their order, each with the result of the one before; what comes before a part counts as its
    own, and what comes after all of them as `last`. `forward` gives a scalar. A storage counts for the part that saves
    it first; those that every forward saves again (masks) and parameters do not count.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runs = [_run(model, forward, parts, last) for _ in range(_WARM_UP + _REPEATS)][_WARM_UP:]
        saved = _saved(model, forward, parts, last)
    finally:
        torch.set_num_threads(threads)
    names = [*parts, last]
    return {
        name: Time(median(run[0][name] for run in runs), median(run[1][name] for run in runs), saved[name])
        for name in names
    }


class _Boundaries:
    """Where in a forward it is: calls `enter` with a part's name when the part before has ended."""

    def __init__(self, parts: Mapping[str, Module], last: str, leave: Callable[[str, Tensor], None]) -> None:
        self.current = next(iter(parts))
        self._following = dict(zip(parts, [*list(parts)[1:], last], strict=True))
        self._parts, self._leave = parts, leave

    def __enter__(self) -> _Boundaries:
        self._stack = ExitStack()
        for name, module in self._parts.items():
            self._stack.callback(module.register_forward_hook(self._hook(name)).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _hook(self, name: str) -> Callable[[Module, Any, Any], None]:
        def ended(module: Module, inputs: Any, output: Any) -> None:
            if self.current == name:  # not when a later part calls this one once more
                self.current = self._following[name]
                self._leave(name, output[0] if isinstance(output, tuple) else output)

        return ended


def _run(
    model: Module, forward: Callable[[], Tensor], parts: Mapping[str, Module], last: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Return milliseconds of each part's forward and backward, once."""
    ended: dict[str, float] = {}
    reached: dict[str, float] = {}

    def leave(name: str, output: Tensor) -> None:
        def arrived(gradient: Tensor) -> None:
            reached[name] = time.thread_time()

        if output.requires_grad:
            output.register_hook(arrived)  # type: ignore[no-untyped-call]
        ended[name] = time.thread_time()

    model.zero_grad(set_to_none=True)
    begin = time.thread_time()
    with _Boundaries(parts, last, leave):
        loss = forward()
    ended[last] = middle = time.thread_time()
    loss.backward()  # type: ignore[no-untyped-call]
    finish = time.thread_time()
    names = [*parts, last]
    forwards = dict(zip(names, _differences([begin, *(ended[name] for name in names)]), strict=True))
    # Where no gradient arrives (in what is recomputed), the backward counts for the part before.
    moments = [middle]
    for name in reversed(names[:-1]):
        moments.append(max(moments[-1], reached.get(name, 0.0)))
    return forwards, dict(zip(reversed(names), _differences([*moments, finish]), strict=True))


def _differences(moments: list[float]) -> list[float]:
    return [_MS * (after - before) for before, after in pairwise(moments)]


def _saved(model: Module, forward: Callable[[], Tensor], parts: Mapping[str, Module], last: str) -> dict[str, int]:
    """Return bytes that each part saves for one forward, seen in two that are alive at once."""
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    alive, seen = [], []
    for _ in range(2):
        saved: dict[int, tuple[str, int]] = {}
        with _Boundaries(parts, last, lambda name, output: None) as at:

            def note(tensor: Tensor, saved: dict[int, tuple[str, int]] = saved, at: _Boundaries = at) -> None:
                storage = tensor.untyped_storage()
                saved.setdefault(storage.data_ptr(), (at.current, storage.nbytes()))

            with on_saved(note):
                alive.append(forward())
        seen.append(saved)
    found: dict[str, int] = defaultdict(int)
    for storage, (name, nbytes) in seen[1].items():
        if storage not in known and storage not in seen[0]:
            found[name] += nbytes
    return found
