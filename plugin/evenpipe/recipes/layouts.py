"""`--pipeline-model-parallel-layout`, read as Megatron reads it."""

from __future__ import annotations

import re
from typing import Final

from evenpipe.planner.arguments import FlagError

__all__ = ["kinds_of"]

_KINDS: Final = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
_FLAG: Final = "--pipeline-model-parallel-layout"


def kinds_of(layout: str, layers: int, stages: int) -> list[list[str]]:
    """The kinds of layers of each part. Raises FlagError where it is none for so many layers and stages."""
    text = layout.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
    parts = text.split("|")
    strange = sorted(set(text) - set(_KINDS) - {"|"})
    if strange:
        raise FlagError(f"{_FLAG} {layout}: {strange[0]!r} is no layer: use E, t, m, L and |")
    if text.count("t") != layers:
        raise FlagError(f"{_FLAG} {layout}: has {text.count('t')} layers, --num-layers {layers}: change one of them")
    if len(parts) % stages:
        raise FlagError(
            f"{_FLAG} {layout}: has {len(parts)} parts, no multiple of --pipeline-model-parallel-size {stages}: change "
            "one of them"
        )
    if not (parts[0].startswith("E") and parts[-1].endswith("L") and text.count("E") == text.count("L") == 1):
        raise FlagError(f"{_FLAG} {layout}: begin the first part with E, and end the last with L")
    return [[_KINDS[letter] for letter in part] for part in parts]
