"""The choices of ``--evenpipe auto`` under Megatron's arguments: the placement, halves of backwards, or none."""

from __future__ import annotations

from argparse import Namespace

from evenpipe.megatron.unsupported import (
    captures,
    overlaps,
    refused_in_a_v,
    refused_settings,
    refused_with_search,
    unlike_a_v,
)
from evenpipe.schedule import Spec
from evenpipe.schedule.known.auto import LOOPED, SPEC, WHOLE
from evenpipe.tuner.choosing import TIE

__all__ = ["auto_spec", "why_stock"]


def why_stock(args: Namespace) -> str | None:
    """Return why there is nothing to choose, so that Megatron's own schedule stays; None where there is."""
    for refusal in (*refused_settings(args, False), *refused_with_search(args)):
        return refusal.why
    if (setting := captures(args)) is None:
        return None
    named = "--external-cuda-graph" if setting == "external_cuda_graph" else f"--cuda-graph-impl {args.cuda_graph_impl}"
    balances = not overlaps(args) and not any(refused_settings(args, True))
    return f"{named} captures its order" + "; if memory is short, give --bpipe, which keeps it" * balances


def auto_spec(args: Namespace, micro_batches: int) -> Spec:
    """Return the schedule `auto` with the placement and the halves of backwards that these arguments allow.

    Two model chunks a stage lie in a V unless a flag rules that out, or Megatron's interleaving is as good: a pipeline
    of p even stages idles (p - 1) / (2 m) of its time there, and no order saves more than all of it.
    """
    if overlaps(args):
        assert SPEC.fused_form is not None
        return SPEC.fused_form
    if any(refused_settings(args, False, halves=True)):
        return WHOLE
    idle = (args.pipeline_model_parallel_size - 1) / (2 * micro_batches)
    looped = idle <= TIE or any(refused_in_a_v(args)) or any(unlike_a_v(args))
    return LOOPED if looped else SPEC
