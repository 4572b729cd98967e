"""CUDA streams for work that happens in program order."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from evenpipe.megatron.cpu_mode.patching import patch
from evenpipe.upstream import Patch

if TYPE_CHECKING:
    import torch

__all__ = ["stream_patches"]


def stream_patches() -> list[Patch]:
    """Streams can be made, entered and waited for; everything on them has already happened."""
    in_order = "megatron-core orders CUDA work with streams; CPU work happens in program order"
    return [
        patch(
            "torch.cuda.streams:Stream",
            lambda original: type("Stream", (_Stream,), {}),
            in_order,
            "(device=None, priority=0, **kwargs)",
            "torch.cuda:Stream",
        ),
        patch("torch.cuda:current_stream", lambda original: lambda device=None: _Stream(), in_order, "(device=None)"),
        patch("torch.cuda:default_stream", lambda original: lambda device=None: _Stream(), in_order, "(device=None)"),
        patch("torch.cuda:stream", lambda original: lambda stream: contextlib.nullcontext(), in_order, "(stream)"),
    ]


class _Stream:
    """A stream on which everything has already happened."""

    def __init__(self, device: object = None, priority: int = 0, **kwargs: object) -> None:
        """Like CUDA's."""

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""
