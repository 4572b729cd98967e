"""Values and calls as Python text."""

from __future__ import annotations

import json
import keyword
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from evenpipe.partition.code.errors import StageCodeError

__all__ = ["WIDTH", "bracketed", "function", "path", "value"]

WIDTH: Final = 120

#: How to name what a node returns.
Name = Callable[[fx.Node], str]


def value(of: Any, name: Name) -> str:
    """An argument; a device is the part's, wherever the model was traced."""
    if isinstance(of, fx.Node):
        return name(of)
    if isinstance(of, torch.device):
        return "device"
    if isinstance(of, str):
        return json.dumps(of, ensure_ascii=False)
    if isinstance(of, float):
        return repr(of).replace("e+", "e") if math.isfinite(of) else f'float("{of}")'
    if isinstance(of, torch.dtype | torch.memory_format | torch.layout):
        return str(of)
    if isinstance(of, slice):
        return f"slice({value(of.start, name)}, {value(of.stop, name)}, {value(of.step, name)})"
    if isinstance(of, tuple):
        return bracketed("(", [value(one, name) for one in of], ",)" if len(of) == 1 else ")")
    if isinstance(of, list):
        return bracketed("[", [value(one, name) for one in of], "]")
    if of is None or of is ... or isinstance(of, bool | int | complex):
        return "..." if of is ... else repr(of)
    raise StageCodeError(f"an argument of type {type(of).__name__} has no text: leave it out of the model's forward")


def bracketed(opening: str, parts: Sequence[str], closing: str, width: int | None = None) -> str:
    """On one line; where it would be longer than `width`, the parts on one of their own, or on one each."""
    inner = ", ".join(parts)
    line = f"{opening}{inner}{closing}"
    if width is None or len(line) <= width:
        return line
    if 4 + len(inner) <= width:
        return f"{opening}\n    {inner}\n{closing}"
    return "\n".join([opening, *(f"    {part}," for part in parts), closing.lstrip(",")])


def function(target: Any, where: str) -> str:
    """`where`: the operation's place in the user's code, for the error about one that has no name."""
    if isinstance(target, torch._ops.OpOverload):
        name = str(target)
        return name if target.namespace == "aten" else f"torch.ops.{name}"
    raise StageCodeError(f"{where}: {target} cannot be written as code of a stage")


def arguments(args: Sequence[Any], kwargs: Mapping[str, Any], name: Name) -> list[str]:
    """Without those that say what is so anyway."""
    said = {key: of for key, of in kwargs.items() if not (key == "pin_memory" and of is False) and of is not _STRIDED}
    return [*(value(of, name) for of in args), *(f"{key}={value(of, name)}" for key, of in said.items())]


_STRIDED: Final = torch.strided


def path(name: str) -> str:
    """How a part names what is so named in the model: `transformer.h.0.attn` is `self.transformer.h[0].attn`."""
    return "self" + "".join(_step(step) for step in name.split("."))


def _step(step: str) -> str:
    if step.isdecimal() and str(int(step)) == step:
        return f"[{step}]"
    return f".{step}" if step.isidentifier() and not keyword.iskeyword(step) else f"[{json.dumps(step)}]"
