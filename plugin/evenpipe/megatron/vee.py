"""The V-shaped placement in megatron-core: of two chunks a stage, rank r has part r of the model and part 2p − 1 − r.

One idea carries it: what rank r holds as an odd chunk in a V is what rank p − 1 − r holds as that chunk where Megatron
interleaves stages. So this process has that rank while an odd chunk is made, computed or saved, and layer numbers,
layouts, embedding, output layer, labels and checkpoints come out right by Megatron's own arithmetic.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map_only

from evenpipe.megatron.supported import PARALLEL_STATE, core_patch
from evenpipe.megatron.symbols import VEE
from evenpipe.schedule import Places, ScheduleError, loop, vee
from evenpipe.upstream import PRESENT, PatchSet

__all__ = [
    "as_interleaved",
    "check_model",
    "check_placement",
    "part_of",
    "sent_to_the_last",
    "tied_weights",
    "vee_patches",
]

_FINALIZE: Final = "megatron.core.distributed.finalize_model_grads"
_ENDS: Final = "(ignore_virtual=True, vp_stage=None)"
_BY_CHUNK: Final = "data is made by who asks for a chunk's end of the model from outside of that chunk"


@contextmanager
def as_interleaved(chunk: int | None) -> Iterator[None]:
    """Inside, this process has the pipeline rank that holds, where stages are interleaved, what it has as `chunk`.

    None, where stages have no chunks, changes nothing. Needs Megatron's parallel state.
    """
    if chunk is None:
        yield
        return
    from megatron.core import parallel_state

    before = parallel_state.get_pipeline_model_parallel_rank()
    group = parallel_state.get_pipeline_model_parallel_group()
    rank = group.rank()
    parallel_state.set_pipeline_model_parallel_rank(group.size() - 1 - rank if chunk % 2 else rank)
    try:
        yield
    finally:
        parallel_state.set_pipeline_model_parallel_rank(before)


def part_of(places: Places) -> Callable[[int], AbstractContextManager[None]]:
    """Return the context in which a chunk is computed under that placement."""
    return as_interleaved if _is_vee(places) else lambda chunk: nullcontext()


def check_placement(places: Places) -> None:
    """Raise ScheduleError for a placement other than Megatron's own and the V."""
    if places != loop(places.stages, places.chunks) and not _is_vee(places):
        raise ScheduleError(
            f"places={places}: Megatron's layers can be placed as loop or vee: write a table with one of them"
        )


def check_model(model: Sequence[torch.nn.Module], places: Places, pipeline: dist.ProcessGroup) -> None:
    """Raise an error where the chunks of this stage were not made for `places`.

    ScheduleError for a placement that Megatron's layers cannot have; ValueError for groups other than those of
    Megatron's parallel state, and for a chunk with another end of the model or other layers than it has there.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
    from megatron.core.utils import unwrap_model

    check_placement(places)
    if pipeline is not parallel_state.get_pipeline_model_parallel_group(check_initialized=False):
        raise ValueError("a V is placed in Megatron's own parallel state: leave p2p_communicator and groups out")
    remedy = "make each chunk under vee_patches() and as_interleaved(chunk)"
    for number, chunk in enumerate(model):
        module, last = unwrap_model(chunk), (pipeline.rank(), number) == places.last
        where = f"chunk {number} of stage {pipeline.rank()}"
        if getattr(module, "post_process", last) != last:
            has, should = ("no", "one") if last else ("an", "none")
            raise ValueError(f"{where} has {has} output layer, and in a V it has {should}: {remedy}")
        if layers := getattr(getattr(module, "decoder", None), "layers", None):
            with as_interleaved(number):
                first = 1 + get_transformer_layer_offset(module.config, vp_stage=number)
            if (begins := layers[0].layer_number) != first:
                raise ValueError(f"{where} begins with layer {begins}, and in a V with {first}: {remedy}")


def _is_vee(places: Places) -> bool:
    return places.chunks > 1 and places == vee(places.stages, places.chunks)


def tied_weights(model: Sequence[Any]) -> list[Parameter]:
    """Return the embedding and its copy in the last chunk, where this stage has both, else nothing.

    `model` are the chunks of this stage.
    """
    ends = [
        [weight for weight in chunk.parameters() if getattr(weight, "shared_embedding", False)]
        for chunk in (model[0], model[-1])
    ]
    return [*ends[0][:1], *ends[1][:1]] if len(model) > 1 and all(ends) else []


def sent_to_the_last(
    losses: list[Any], tokens: Tensor, places: Places, pipeline: dist.ProcessGroup
) -> tuple[list[Any], Tensor]:
    """Return this stage's losses and number of tokens, after those of the stage with the loss are the last stage's.

    There Megatron looks for them, whatever they are, and for what multi-token prediction has added up for the log. The
    stage that had them has none afterwards.
    """
    source, target = places.last.stage, places.stages - 1
    if source == target or pipeline.rank() not in (source, target):
        return losses, tokens
    from megatron.core import parallel_state
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    ranks, logged = dist.get_process_group_ranks(pipeline), MTPLossLoggingHelper.tracker
    if pipeline.rank() == source:
        added = {name: value for name, value in logged.items() if isinstance(value, Tensor)}
        dist.send_object_list([tree_map_only(Tensor, Tensor.cpu, (losses, tokens, added))], ranks[target], pipeline)
        logged.clear()
        return [], tokens
    received: list[Any] = [None]
    dist.recv_object_list(received, ranks[source], pipeline)
    losses, tokens, added = tree_map_only(Tensor, lambda tensor: tensor.to(tokens.device), received[0])
    if added:  # over its own replicas
        logged |= {**added, "avg_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return losses, tokens


def vee_patches() -> PatchSet:
    """The patches of a V in megatron-core; apply them before its parallel state is made."""
    from evenpipe.megatron.saved_once import saved_once

    ends = [
        core_patch(name, f"{PARALLEL_STATE}:{name}", _end_of_chunk, _BY_CHUNK, _ENDS, rebinds=True)
        for name in ("is_pipeline_first_stage", "is_pipeline_last_stage")
    ]
    return PatchSet(
        "vee",
        [
            core_patch(
                "rank",
                "megatron.core.utils:get_pg_rank",
                _rank_of,
                "Megatron lets a pipeline rank be set, and asks process groups, which do not know it, beside",
                "(group=None)",
                rebinds=True,
            ),
            *ends,
            core_patch(
                "embedding ranks",
                f"{PARALLEL_STATE}:initialize_model_parallel",
                _with_embedding_ranks,
                "scripts say which ranks have copies of the embedding as if stages were interleaved",
                PRESENT,
                rebinds=True,
            ),
            core_patch(
                "tied weights",
                f"{_FINALIZE}:_allreduce_word_embedding_grads",
                _sum_tied_gradients,
                "the embedding and its copy in the output layer are on one rank, whose gradients nobody sums",
                PRESENT,
            ),
            *saved_once(),
        ],
        VEE,
    )


def _rank_of(original: Callable[[Any], int], group: Any = None) -> int:
    from megatron.core import parallel_state

    if group is not None and group is parallel_state.get_pipeline_model_parallel_group(check_initialized=False):
        rank: int = parallel_state.get_pipeline_model_parallel_rank()
        return rank
    return original(group)


def _end_of_chunk(original: Callable[..., bool], ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    with as_interleaved(vp_stage):
        return original(ignore_virtual, vp_stage)


def _with_embedding_ranks(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    from megatron.core import parallel_state

    bound = inspect.signature(original).bind(*args, **kwargs)
    given = bound.arguments.get("get_embedding_ranks") or parallel_state.default_embedding_ranks
    chunks = bound.arguments.get("virtual_pipeline_model_parallel_size") or 1
    if chunks % 2 == 0:  # copies are in the last chunks, the embedding in the first
        bound.arguments["get_embedding_ranks"] = functools.partial(_mirrored, given)
    original(*bound.args, **bound.kwargs)


def _mirrored(given: Callable[..., Sequence[int]], ranks: Sequence[int], *more: Any) -> list[int]:
    copies = {ranks[len(ranks) - 1 - ranks.index(rank)] for rank in given(ranks, *more) if rank != ranks[0]}
    return [ranks[0], *sorted(copies - {ranks[0]})]


def _sum_tied_gradients(original: Callable[..., None], model: Sequence[Any], *args: Any, **kwargs: Any) -> None:
    """As Megatron, but that the copy's gradients are added to the embedding's first, and get the sum afterwards."""
    gradients = [getattr(weight, "main_grad", weight.grad) for weight in tied_weights(model)]
    both = [gradient for gradient in gradients if gradient is not None]  # none, where they are frozen
    for copy in both[1:]:
        both[0].add_(copy)
    original(model, *args, **kwargs)
    for copy in both[1:]:
        copy.copy_(both[0])
