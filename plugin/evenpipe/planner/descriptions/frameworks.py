"""What trains a model, and what it does by default that shows in time or memory."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from evenpipe.planner.descriptions.described import Described
from evenpipe.planner.descriptions.devices import Precision

__all__ = ["Framework"]


class Framework(Described):
    """Defaults of a training framework; a run's own flags come before them.

    attention: ``unfused`` keeps all scores, with a fused softmax where the shape allows; ``flash`` keeps none.
    gradients_in_fp32: gradients are accumulated in 4 bytes. sharded_optimizer: ZeRO-1. sequence_parallel: where there
    is tensor parallelism. overlap_collectives: those of column-parallel layers run beside the backward's matrix
    products. overlap_gradients, overlap_parameters: the reduction of gradients and the gathering of parameters run
    beside compute. hand_over_us: what a stage waits for the host in a hand-over to a neighbour. blocking: schedules
    in which a stage computes nothing during a hand-over; in others, messages travel beside compute. divided_messages:
    each tensor-parallel rank sends its part of a hand-over, also without sequence parallelism. one_queue: it demands
    CUDA_DEVICE_MAX_CONNECTIONS=1 with tensor or context parallelism.
    """

    precision: Precision
    attention: Literal["unfused", "flash"]
    gradients_in_fp32: bool
    sharded_optimizer: bool
    sequence_parallel: bool
    overlap_collectives: bool
    overlap_gradients: bool
    overlap_parameters: bool
    hand_over_us: float = Field(ge=0)
    blocking: tuple[str, ...] = Field(strict=False)
    divided_messages: bool
    one_queue: bool = False
