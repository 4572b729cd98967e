"""Sends between stages, which gloo carries out late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evenpipe.megatron.cpu_mode.patching import patch
from evenpipe.upstream import Patch

__all__ = ["send_patches"]


def send_patches() -> list[Patch]:
    """What is sent stays in memory until it has been."""
    return [
        patch(
            "megatron.core.pipeline_parallel.p2p_communication:_p2p_ops",
            _sending_aliases,
            "megatron-core frees a stage's output while gloo still sends it; an alias keeps the memory until then",
            "(*, tensor_send_prev, tensor_recv_prev, tensor_send_next, tensor_recv_next, group, "
            "prev_pipeline_rank, next_pipeline_rank)",
        )
    ]


def _sending_aliases(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_p2p_ops` on detached aliases of what it sends.

    `deallocate_output_tensor` swaps the `.data` of the sent tensor; gloo keeps the tensor but reads through it late.
    """

    def p2p_ops(**kwargs: Any) -> Any:
        for name in ("tensor_send_prev", "tensor_send_next"):
            if kwargs[name] is not None:
                kwargs[name] = kwargs[name].detach()
        return original(**kwargs)

    return p2p_ops
