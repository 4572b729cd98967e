"""Scripts make each chunk of a model as it lies in a V-shaped placement, and save and load it so."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

from evenpipe.megatron.supported import MEGATRON_CORE, RELEASES
from evenpipe.megatron.symbols import CHUNKS, training_patch
from evenpipe.megatron.vee import as_interleaved, tied_weights
from evenpipe.upstream import Patch, PatchSet
from evenpipe.upstream.ending import end_job

__all__ = ["chunk_patches", "chunks_in_a_vee"]

_REASON: Final = "Megatron asks process groups whether a rank has an end of the model, and not which chunk of it"


def chunks_in_a_vee() -> PatchSet:
    """The patches of this release under which a script's chunks are made as a V has them."""
    series = MEGATRON_CORE.series(RELEASES)
    return PatchSet("chunks", [patch for patch in chunk_patches() if series in patch.versions], CHUNKS)


def chunk_patches() -> Iterator[Patch]:
    """Yield those of all releases."""
    yield training_patch("model", "megatron.training.training:get_model", _made, _REASON)
    stages = "megatron.training.models.dist_utils:build_virtual_pipeline_stages"
    yield training_patch("stages", stages, _made, _REASON)
    read = "megatron.training.checkpointing:_load_base_checkpoint"
    yield training_patch("load", read, _read, "checkpoints of a file a rank do not say where their layers belong")


def _made(original: Callable[..., Any], provider: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    chunks = original(functools.partial(_make_chunk, provider), *args, **kwargs)
    pair = tied_weights(chunks)
    if pair:  # Megatron fills the copy with zeros, and has ranks that are others' get it from the embedding's
        pair[1].data.copy_(pair[0].data)
    return chunks


def _make_chunk(
    provider: Callable[..., Any],
    *args: Any,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    **others: Any,
) -> Any:
    """Return the chunk with those ends of the model that it has in a V; it is saved, too, with its own layers."""
    from megatron.core import parallel_state

    if vp_stage is None:
        return provider(*args, pre_process=pre_process, post_process=post_process, **others)
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    with as_interleaved(vp_stage):
        chunk = provider(*args, pre_process=first, post_process=last, vp_stage=vp_stage, **others)
    chunk.sharded_state_dict = functools.partial(_in_chunk, vp_stage, chunk.sharded_state_dict)
    return chunk


def _read(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    found = original(*args, **kwargs)
    if getattr(found[3], "name", "") == "LEGACY":
        end_job(
            f"--load: {found[1]} is of --ckpt-format torch, which counts layers from the start of their chunk and does "
            "not say where that is: convert it to torch_dist in a run without EvenPipe's flags "
            "(--ckpt-convert-format torch_dist --ckpt-convert-save FOLDER)"
        )
    return found


def _in_chunk(chunk: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with as_interleaved(chunk):
        return call(*args, **kwargs)
