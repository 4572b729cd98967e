"""Times the nodes of one transformer layer of each kind, and what is before and behind them, on this CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch.nn import Module

from evenpipe.partition.layouts.layers import Time
from evenpipe.partition.layouts.segments import timed
from evenpipe.partition.layouts.shape import LayoutError, Shape
from evenpipe.partition.layouts.work import kinds, work_of

__all__ = ["measured"]

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


def measured(shape: Shape, build: Callable[[], tuple[Module, dict[str, Module]]]) -> dict[str, dict[str, Time]]:
    """Milliseconds and saved bytes of the nodes of one layer of each kind, by kind, by node.

    `build` makes a model with one layer of each kind, and its parts by kind, in order. Raises LayoutError if it would
    take too long.
    """
    nodes = [node for kind in kinds(shape) for node in work_of(shape, kind)]
    flops = sum(node.flops for node in nodes)
    parameters = sum(node.parameters + node.expert_parameters + node.words for node in nodes)
    if flops > _MOST_FLOPS or parameters > _MOST_PARAMETERS or shape.context_parallel > 1:
        raise LayoutError(
            f"one layer of each kind ({flops / 1e12:.1f} × 10^12 operations, {parameters / 1e9:.1f} × 10^9 parameters) "
            f"cannot be timed on this CPU: at most {_MOST_FLOPS / 1e12} and {_MOST_PARAMETERS / 1e9:.0f} can, without "
            "context parallelism: name a device whose peaks to take"
        )
    model, parts = build()
    tokens = torch.randint(shape.vocabulary, (shape.micro_batch, shape.sequence))
    places = torch.arange(shape.sequence).expand_as(tokens)
    mask = torch.ones(1, 1, shape.sequence, shape.sequence).tril() < 0.5

    def forward() -> torch.Tensor:
        return model(tokens, places, mask, labels=tokens).float().mean()  # type: ignore[no-any-return]

    modules = {f"{kind}.{name}": node for kind, part in parts.items() for name, node in _nodes(kind, part).items()}
    found: dict[str, dict[str, Time]] = {}
    for name, time in timed(model, forward, modules, last="loss.loss", repeats=_REPEATS).items():
        kind, _, node = name.partition(".")
        found.setdefault(kind, {})[node] = time
    return found


def _nodes(kind: str, part: Module) -> dict[str, Module]:
    """The modules of a transformer layer that are timed, in order; what follows them is its end."""
    if kind not in ("dense", "experts"):
        return {kind: part}
    known = dict(part.named_modules())
    return {node: known[path] for node, path in _MODULES.items() if path in known} | {"end": part}
