"""Gives processes the ranks under which the two stages that trade activations are neighbours on one node."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, MutableMapping
from math import lcm

import torch.distributed as dist

from evenpipe.megatron_lm.flags import ArgumentError
from evenpipe.runtime.placement import Launch, NotPlacedError, Placement, place
from evenpipe.settings.config import EvenPipeConfig
from evenpipe.settings.spelling import flag

__all__ = ["place_process"]


def place_process(
    args: Namespace, config: EvenPipeConfig, environ: MutableMapping[str, str]
) -> Placement | NotPlacedError:
    """Give this process the rank that its place asks for: in RANK of `environ` and in `args.rank`.

    To be called once, before torch.distributed is started, in all processes alike, with Megatron's validated arguments
    and the environment that torchrun made. LOCAL_RANK, and so the device, stays. Where ranks are not to be placed
    or, unless the flag asks for it, cannot be, nothing is changed, and what keeps them from it is returned.

    Raises:
        ArgumentError: --pair-adjacent is given, and cannot be had.
    """
    try:
        placement = _placement(args, config, environ)
    except NotPlacedError as obstacle:
        if config.pair_adjacent:
            raise ArgumentError(f"{flag('pair_adjacent')}: {obstacle}") from None
        # Its traceback would keep the frame of Megatron's `pretrain`, and so data iterators and their workers.
        return obstacle.with_traceback(None)
    args.rank = placement.apply(environ)
    return placement


def _placement(args: Namespace, config: EvenPipeConfig, environ: Mapping[str, str]) -> Placement:
    _refuse(args, config)
    launch = Launch.of(environ)
    if not launch.counts_node_by_node:
        raise NotPlacedError(
            f"WORLD_SIZE {launch.world_size} is not {launch.group_world_size} nodes of {launch.local_world_size}, "
            "numbered one after the other: start as many processes, --nproc-per-node, on every node"
        )
    stages, per_node = args.pipeline_model_parallel_size, launch.local_world_size
    together, tensor = _exchanging_in_every_layer(args), args.tensor_model_parallel_size
    if launch.world_size % (stages * together):
        raise NotPlacedError(
            f"WORLD_SIZE {launch.world_size} is not --pipeline-model-parallel-size {stages} times whole groups of "
            f"{together} tensor-, context- and expert-parallel ranks: choose other sizes"
        )
    # Asked for, pairs come before context- and expert-parallel ranks; nobody is to be surprised by that.
    for group in (together, tensor) if config.pair_adjacent else (together,):
        if launch.group_world_size == 1 or (per_node % group == 0 and per_node >= 2 * group):
            if stages < 4 and args.virtual_pipeline_model_parallel_size is None and not config.pair_adjacent:
                raise NotPlacedError(
                    f"--pipeline-model-parallel-size {stages} holds no more than BPipe's bound, so no pair trades"
                )
            return place(stages, group, launch.world_size // (stages * group), per_node)
    if config.pair_adjacent or together == tensor:
        raise NotPlacedError(
            f"a node of {per_node} processes does not hold two whole groups of --tensor-model-parallel-size {tensor}"
        )
    raise NotPlacedError(
        f"a node of {per_node} processes does not hold two whole groups of {together} tensor-, context- and expert-"
        f"parallel ranks; {flag('pair_adjacent')} spreads such groups over nodes"
    )


def _refuse(args: Namespace, config: EvenPipeConfig) -> None:
    """Raise for what does not go together with placed ranks, whatever the sizes."""
    if not config.bpipe:
        raise NotPlacedError(f"without {flag('bpipe')} there are no pairs: add it, or leave this out")
    if config.pair_adjacent is False:
        raise NotPlacedError(f"{flag('pair_adjacent').replace('--', '--no-')} is given")
    if args.use_tp_pp_dp_mapping:
        raise NotPlacedError("--use-tp-pp-dp-mapping numbers ranks in an order of its own: leave one of them out")
    if args.async_save and args.use_persistent_ckpt_worker:
        # The worker synchronises the device rank % device_count before it writes what it copied from another one.
        raise NotPlacedError(
            "--use-persistent-ckpt-worker takes a rank for the number of a GPU, and would write unfinished copies: "
            "leave one of them out"
        )
    if getattr(args, "non_persistent_ckpt_type", None) == "local":
        raise NotPlacedError(
            "--non-persistent-ckpt-type local keeps copies by rank, --replication-jump ranks apart, on the nodes that "
            "hold the ranks: leave one of them out"
        )
    if dist.is_initialized():
        raise NotPlacedError("torch.distributed has been started before Megatron's arguments are known")


def _exchanging_in_every_layer(args: Namespace) -> int:
    """How many ranks, consecutive in Megatron's order, exchange something in every layer: best left on one node."""
    dense = args.tensor_model_parallel_size * args.context_parallel_size * getattr(args, "gtp_weight_remat_size", 1)
    if args.num_experts is None:
        return int(dense)
    expert_tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    experts = expert_tensor * args.expert_model_parallel_size * getattr(args, "expert_gtp_weight_remat_size", 1)
    return lcm(dense, experts)
