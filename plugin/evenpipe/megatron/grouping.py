"""How many micro-batches a stage takes in a row: those of a chunk, as Megatron is told, or kFkB's."""

from __future__ import annotations

from typing import Any

__all__ = ["group_size"]


def group_size(settings: Any, own: int) -> int:
    """Return the group size of a schedule: `own`, or Megatron's where stages have several chunks (1: of p).

    `settings` are Megatron's, of the model or arguments, whose attributes have the same names.
    """
    if settings.virtual_pipeline_model_parallel_size is None:
        return own
    given = getattr(settings, "microbatch_group_size_per_vp_stage", None)
    return 1 if given in (None, settings.pipeline_model_parallel_size) else int(given)
