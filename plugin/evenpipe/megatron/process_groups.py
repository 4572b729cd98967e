"""The process groups that a schedule works with: those it is given, or Megatron's global ones."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from evenpipe.megatron.supported import CoreRelease

__all__ = ["process_groups"]

_GLOBAL: Mapping[str, Callable[[], Any]] = {
    "tp": parallel_state.get_tensor_model_parallel_group,
    "pp": parallel_state.get_pipeline_model_parallel_group,
    "cp": parallel_state.get_context_parallel_group,
    "embd": functools.partial(parallel_state.get_embedding_group, check_initialized=False),
    "pos_embd": functools.partial(parallel_state.get_position_embedding_group, check_initialized=False),
    "dp_cp": functools.partial(
        parallel_state.get_data_parallel_group, with_context_parallel=True, partial_data_parallel=False
    ),
    "tp_dp_cp": functools.partial(parallel_state.get_tensor_and_data_parallel_group, with_context_parallel=True),
    "dp": functools.partial(
        parallel_state.get_data_parallel_group, with_context_parallel=False, partial_data_parallel=False
    ),
}


def process_groups(release: CoreRelease, communicator: Any, given: Any) -> Any:
    """An instance of `release.process_groups_class` with at least tp, pp and cp.

    Like Megatron, takes either both a communicator and groups or neither; raises ValueError otherwise, and for those of
    a pipeline of several modules.
    """
    argument = release.process_groups_argument
    if (communicator is None) != (given is None):
        raise ValueError(f"p2p_communicator and {argument} belong together: give both or neither")
    module, _, name = release.process_groups_class.partition(":")
    kind = getattr(importlib.import_module(module), name)
    if given is None:
        groups = kind()
        for attribute in release.process_groups:
            setattr(groups, attribute, _GLOBAL[attribute]())
        return groups
    for what, value, expected in (("p2p_communicator", communicator, P2PCommunicator), (argument, given, kind)):
        if not isinstance(value, expected):
            raise ValueError(
                f"{what}: EvenPipe schedules pipelines of one model, with a {expected.__name__}, and got a "
                f"{type(value).__name__}: leave EvenPipe's schedule out"
            )
    return given
