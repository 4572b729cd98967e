"""A GPU, as a planner needs to know it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from evenpipe.planner.descriptions.described import Described

__all__ = ["Device", "Precision"]

Precision = Literal["fp32", "fp16", "bf16"]
_Rate = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(gt=0, le=1)]


class Device(Described):
    """What a GPU can do, by its maker, and what of its memory PyTorch is left with.

    tflops: 10^12 operations/s by precision, dense. matmul: share of them that the fastest matrix product has been
    measured to reach; an A100's, if left out. memory_gib: what ``torch.cuda.mem_get_info`` has as total. reserve_gib:
    CUDA's context, libraries and NCCL's communicators. memory_gbps, host_gbps: 10^9 bytes/s to its own
    memory and, one way, to the host's. peer_gbps: to other GPUs of its node, one way. launch_us: a kernel, at least.
    attention: share of ``tflops`` that fused attention reaches forward and backward. framework: the oldest that is
    run on it, where that is newer than what a model was trained with.
    """

    tflops: Mapping[Precision, _Rate] = Field(min_length=1)
    matmul: _Share = 0.869
    multiprocessors: int = Field(ge=1)
    memory_gib: float = Field(gt=0)
    reserve_gib: float = Field(ge=0)
    memory_gbps: float = Field(gt=0)
    peer_gbps: float = Field(gt=0)
    host_gbps: float = Field(gt=0)
    launch_us: float = Field(ge=0)
    attention: tuple[_Share, _Share] = Field(strict=False)
    framework: str | None = None
