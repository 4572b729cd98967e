"""A Megatron GPT that is laid out, as its flags describe it: the model, its run and its pipeline."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from evenpipe.descriptions import DescriptionError, Model
from evenpipe.planner import arguments
from evenpipe.planner.arguments import FlagError, Pipelined, Values, model_of, run_of, undescribed
from evenpipe.planner.run import Run
from evenpipe.schedule import ScheduleError, Size, find

__all__ = ["Gpt", "LayoutError", "Pipeline", "laid_out_by", "parse_flags"]

_HAND_LAYOUTS: Final = {
    "pipeline_model_parallel_layout": "--pipeline-model-parallel-layout",
    "decoder_first_pipeline_num_layers": "--decoder-first-pipeline-num-layers",
    "decoder_last_pipeline_num_layers": "--decoder-last-pipeline-num-layers",
    "account_for_embedding_in_pipeline_split": "--account-for-embedding-in-pipeline-split",
    "account_for_loss_in_pipeline_split": "--account-for-loss-in-pipeline-split",
}


class LayoutError(ValueError):
    """No layout can be found for these flags; the message is one line that names the flag and the remedy."""


@dataclass(frozen=True)
class Pipeline:
    """`stages` p, model `chunks` v of each, and `micro_batches` m of a batch.

    `placed_by`: the schedule that places the parts, unless Megatron does.
    """

    stages: int
    chunks: int
    micro_batches: int
    placed_by: str | None = None

    @property
    def parts(self) -> int:
        return self.stages * self.chunks

    @property
    def schedule(self) -> str:
        """Return the name of the schedule that runs on it: Megatron's, unless another places the parts."""
        return self.placed_by or ("interleaved" if self.chunks > 1 else "1f1b")

    @property
    def owners(self) -> list[int]:
        """Return the stage of each part, in the order of the model."""
        places = find(self.schedule).places(Size(self.stages, self.micro_batches, self.chunks))
        return [place.stage for place in places.order]


class Gpt(NamedTuple):
    """A model and the run that divides it, in the planner's words."""

    model: Model
    run: Run

    @classmethod
    def of(cls, args: Namespace, world_size: int | None = None, latent: bool = False) -> Gpt:
        """From Megatron's arguments, parsed, validated or not. `world_size` None: as few GPUs as can be.

        `latent`: its attention may be multi-head latent, which written plans do not describe. Raises LayoutError.
        """
        if (flag := laid_out_by(args)) is not None:
            raise LayoutError(f"{flag}: already lays the layers out, by hand: leave it out, and the best is looked for")
        other = undescribed(args)
        if getattr(args, "multi_latent_attention", None) and not latent:
            raise LayoutError(
                "--multi-latent-attention: is neither timed on a CPU nor in a written plan: name a device or a cluster "
                "for its layout, and give the run that layout by --pipeline-model-parallel-layout"
            )
        if other is not None:
            raise LayoutError(f"{other}: layouts are found for GPT models with Megatron's own attention only")
        try:
            completed = _completed(Values(args), args, world_size)
            return cls(model_of(completed, "GPT"), run_of(completed, Pipelined()))
        except (FlagError, DescriptionError) as error:
            raise LayoutError(str(error)) from None

    @property
    def stage_ranks(self) -> int:
        return self.run.gpus // self.run.stages

    def has_experts(self, layer: int) -> bool:
        """Return whether the transformer layer of that number, from 0, has experts."""
        return self.model.expert_layers(layer, layer + 1) > 0

    def pipeline(self, args: Namespace) -> Pipeline:
        """How the flags cut it: stages, virtual stages as either of Megatron's two flags has them, micro-batches."""
        value, stages = Values(args), self.run.stages
        chunks = value("num_virtual_stages_per_pipeline_rank", 0)
        each = value("num_layers_per_virtual_pipeline_stage", 0)
        if not chunks and each and self.model.layers % (stages * each):
            raise LayoutError(
                f"--num-layers-per-virtual-pipeline-stage {each}: {self.model.layers} layers on {stages} stages are no "
                "multiple of it: say --num-virtual-stages-per-pipeline-rank V instead"
            )
        chunks = chunks or (self.model.layers // (stages * each) if each else 0)
        placed_by = _placing(value("evenpipe_schedule", "1f1b"))
        if placed_by is not None and chunks not in (0, 2):
            raise LayoutError(f"--evenpipe-schedule {placed_by}: has 2 model chunks a stage, and these flags {chunks}")
        chunks = chunks or (1 if placed_by is None else 2)
        if chunks > 1 and stages < 2:
            raise LayoutError("virtual stages: --pipeline-model-parallel-size 1 has none: leave them out")
        samples = self.run.micro_batch * self.run.data
        if self.run.global_batch % samples:
            raise LayoutError(
                f"--global-batch-size {self.run.global_batch}: no multiple of --micro-batch-size "
                f"{self.run.micro_batch} × {self.run.data} replicas: change one of them"
            )
        return Pipeline(stages, chunks, self.run.micro_batches, placed_by)


def _placing(schedule: str) -> str | None:
    """Return the schedule, if it is a known one that places the parts otherwise than Megatron."""
    try:
        return schedule if "vee" in find(schedule).needs else None
    except ScheduleError:  # a table of the user's, whose placement is its own
        return None


def _completed(value: Values, args: Namespace, world_size: int | None) -> Namespace:
    """With what Megatron derives from its flags: replicas, the batch and the size of a head."""
    stages, tensor = value("pipeline_model_parallel_size", 1), value("tensor_model_parallel_size", 1)
    context, expert = value("context_parallel_size", 1), value("expert_model_parallel_size", 1)
    least = stages * math.lcm(tensor * context, expert * value("expert_tensor_parallel_size", tensor))
    world_size = world_size or least
    if world_size % least:
        raise LayoutError(
            f"world size {world_size}: no multiple of {least}, the fewest GPUs that these tensor, pipeline, "
            "context and expert parallel sizes need: name the number of GPUs of the whole run"
        )
    data = world_size // (stages * tensor * context)
    head = value.needed("hidden_size") // value.needed("num_attention_heads")
    derived = {
        "data_parallel_size": data,
        "global_batch_size": value("global_batch_size", value("micro_batch_size", 1) * data),
        "kv_channels": value("kv_channels", head),  # Megatron itself refuses heads that do not divide
        "virtual_pipeline_model_parallel_size": None,
    }
    return Namespace(**{**vars(args), **derived})


def laid_out_by(args: Namespace) -> str | None:
    """Return the flag with which a user lays layers out by hand, if any."""
    return next((flag for name, flag in _HAND_LAYOUTS.items() if getattr(args, name, None)), None)


def parse_flags(flags: Sequence[str]) -> Namespace:
    """Only what is given is an attribute. Raises LayoutError for a flag that is not among the few that are known."""
    try:
        known, unknown = arguments.parse_flags(flags)
    except FlagError as error:
        raise LayoutError(str(error)) from error
    if unknown:
        raise LayoutError(
            f"{unknown[0]}: not among the flags that are known without Megatron-LM: put the script's path before the "
            "flags (.../Megatron-LM/pretrain_gpt.py), or leave it out if layers do not depend on it"
        )
    return known
