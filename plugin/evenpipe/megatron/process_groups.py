"""The process groups that a schedule works with: those it is given, or Megatron's global ones."""

from __future__ import annotations

import importlib
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from evenpipe.megatron.supported import CoreRelease

__all__ = ["process_groups"]


def process_groups(release: CoreRelease, communicator: P2PCommunicator | None, given: Any) -> Any:
    """An instance of `release.process_groups_class` with tp, pp, cp, embd, pos_embd and dp_cp.

    Like Megatron, takes either both a communicator and groups or neither; raises ValueError otherwise.
    """
    if (communicator is None) != (given is None):
        raise ValueError(
            f"p2p_communicator and {release.process_groups_argument} belong together: give both or neither"
        )
    if given is not None:
        return given
    module, name = release.process_groups_class.split(":")
    groups = getattr(importlib.import_module(module), name)()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return groups
