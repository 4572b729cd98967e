"""The parts of a layout as Megatron's ``--pipeline-model-parallel-layout`` has them."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["unrolled"]

#: What is written once with its number, groups first, as `PipelineParallelLayerLayout.parse_str_to_list` reads it.
_REPEATED: Final = (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)")


def unrolled(layout: str) -> list[str]:
    """Return the symbols of each part, repetitions written out, whatever they are: "Et*2|(t|)*2L" is Ett, t, t, L."""
    text = layout.replace(",", "")
    for repeated in _REPEATED:
        text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
    return text.split("|")
