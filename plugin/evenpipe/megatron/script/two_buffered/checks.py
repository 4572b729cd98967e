"""Megatron's arguments that 2BW cannot be had with, and why."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from types import MappingProxyType
from typing import Final

from evenpipe.megatron.refusals import Refusal, refused_with_two_versions

__all__ = ["refused_arguments"]

_REMEDY: Final = "leave it out, or use --evenpipe-schedule 1f1b"
_BETWEEN: Final = "reads or changes gradients or weights before the step, which 2bw finishes in the next iteration"
_JOINS: Final = "joins all stages in every iteration, which 2bw is there to avoid"

_REFUSED = MappingProxyType(
    {
        "use_torch_fsdp2": "gathers and frees parameters, of which 2bw needs two versions",
        "timing_log_level": _JOINS,
        "log_energy": "joins all stages at each log",
        "log_straggler": "joins all stages at each log",
        "adlr_autoresume": "joins all stages to ask whether to stop: use --exit-signal-handler",
        "train_sync_interval": "waits for what a stage is yet to receive",
        "log_params_norm": _JOINS,
        "check_weight_hash_across_dp_replicas_interval": _BETWEEN,
        "save_wgrads_interval": _BETWEEN,
        "save_dgrads_interval": _BETWEEN,
        "save_params_interval": _BETWEEN,
        "save_activations_interval": _BETWEEN,
        "log_max_attention_logit": _JOINS,
        "perform_rl_step": "makes each batch with the weights of the one before",
        "iterations_to_skip": "skips data that 2bw has begun to read",
        "dataloader_save": "saves how far data has been read, and 2bw reads ahead",
    }
)
_WITH_BPIPE = MappingProxyType(
    {
        "async_save": "asks all ranks in every iteration whether it is done",
        "distributed_timeout_seconds_after_init": "waits for the whole device after the first iteration",
        "empty_unused_memory_level": "waits for the whole device in every iteration",
    }
)
_OPTIMIZERS: Final = ("adam", "sgd")


def refused_arguments(args: Namespace, bpipe: bool) -> Iterator[Refusal]:
    """What in Megatron's arguments does not go together with 2BW, or with BPipe on it.

    A release that has no argument of a name does not have what it would do.
    """
    for setting, reason in _WITH_BPIPE.items():
        if bpipe and getattr(args, setting, None):
            yield Refusal(setting, "", f"{reason}, while partners are amid transfers", "leave it, or --bpipe, out")
    for refusal in refused_with_two_versions(args):
        yield refusal._replace(remedy=_REMEDY)
    for setting, reason in _REFUSED.items():
        if getattr(args, setting, None):
            yield Refusal(setting, "", reason, _REMEDY)
    if args.optimizer not in _OPTIMIZERS:
        yield Refusal("optimizer", f" {args.optimizer}", f"is none of {', '.join(_OPTIMIZERS)}", _REMEDY)
    if args.vision_pretraining and args.vision_pretraining_type == "dino":
        yield Refusal("vision_pretraining_type", " dino", _BETWEEN, _REMEDY)
    if getattr(args, "non_persistent_ckpt_type", None) == "local":
        yield Refusal("non_persistent_ckpt_type", " local", "has no room for a second weight version", _REMEDY)
