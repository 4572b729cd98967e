"""What crosses the ends of DeepSpeed's stages where micro-batches differ: whatever its own engine brings across."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.pipe.engine import PipelineEngine

from evenpipe.deepspeed.stage import Boundary

_ENGINE = SimpleNamespace(device=torch.device("cpu"))
_BOUNDARY = Boundary(_ENGINE)


@pytest.mark.parametrize(
    "outputs",
    [
        torch.zeros(2, 3),
        (torch.zeros(2, 3),),
        (torch.zeros(()), torch.zeros(0, 5, dtype=torch.bfloat16), torch.zeros(7, dtype=torch.int64)),
        tuple(torch.zeros(1, dtype=dtype) for dtype in PipelineEngine.ID_TO_DTYPE),
    ],
)
def test_what_is_described_is_received_in_the_same_form(outputs: Any) -> None:
    is_tuple, buffers = _BOUNDARY.described_buffers(_BOUNDARY.description(outputs))
    assert is_tuple == isinstance(outputs, tuple)
    sent = outputs if is_tuple else (outputs,)
    assert [(one.shape, one.dtype) for one in buffers] == [(one.shape, one.dtype) for one in sent]
    assert [one.requires_grad for one in buffers] == [one.dtype.is_floating_point for one in sent]


def test_the_largest_input_or_output_so_far_is_known() -> None:
    boundary = Boundary(_ENGINE)
    for length, nbytes in ((4, 32), (2, 32), (6, 48)):
        boundary.described_buffers(_BOUNDARY.description((torch.zeros(length), torch.zeros(length))))
        assert boundary.nbytes == nbytes
