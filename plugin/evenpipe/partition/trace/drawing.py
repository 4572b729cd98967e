"""Which operations draw random numbers, and which number each of them has in the model's own execution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

__all__ = ["draws", "draws_within", "number_draws"]

#: An operation with one of these arguments draws nothing where it is zero or false.
_SWITCHES: Final = ("dropout_p", "train", "training")


def draws(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call draws random numbers: dropout of nothing does not, nor does attention without dropout.

    It holds of a call in a graph as of those that it comes to in a run, so that both count alike.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):
        return False
    names = [argument.name for argument in function._schema.arguments]
    defaults = {argument.name: argument.default_value for argument in function._schema.arguments}
    given = defaults | dict(zip(names, args, strict=False)) | dict(kwargs)
    off = any(name in given and given[name] in (0, False) for name in _SWITCHES)
    certain = "dropout" in function._schema.name and given.get("p") in (0, 1)
    return not (off or certain)


def draws_within(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """As `draws`, also for an operation that runs a graph of its own."""
    inner = (module for module in args if isinstance(module, fx.GraphModule))
    return draws(function, args, kwargs) or any(True for module in inner for _ in _drawing(module))


def number_draws(module: fx.GraphModule) -> None:
    """Writes `ordinal` into the meta of every node that draws: how many did before."""
    for ordinal, node in enumerate(_drawing(module)):
        node.meta["ordinal"] = ordinal


def _drawing(module: fx.GraphModule) -> Iterator[fx.Node]:
    for node in module.graph.nodes:
        if node.op == "call_function":
            if draws(node.target, node.args, node.kwargs):
                yield node
            for source in node.all_input_nodes:
                inner = getattr(module, str(source.target), None) if source.op == "get_attr" else None
                if isinstance(inner, fx.GraphModule):
                    yield from _drawing(inner)
