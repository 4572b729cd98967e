"""Those of Megatron's flags that decide about layouts, for where there is no megatron.training to parse all of them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from evenpipe.partition.layouts.shape import LayoutError
from evenpipe.planner.arguments import FlagError
from evenpipe.planner.arguments import parse_flags as parsed

__all__ = ["parse_flags"]


def parse_flags(flags: Sequence[str]) -> Namespace:
    """Only what is given is an attribute. Raises LayoutError for a flag that is not among the few that are known."""
    try:
        found, unknown = parsed(flags)
    except FlagError as error:
        raise LayoutError(str(error)) from error
    if unknown:
        raise LayoutError(
            f"{unknown[0]}: not among the flags that are known without Megatron-LM: put the script's path before the "
            "flags (.../Megatron-LM/pretrain_gpt.py), or leave it out if layers do not depend on it"
        )
    return found
