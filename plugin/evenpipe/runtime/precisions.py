"""The types of a model's weights, of what it computes and of what travels between its stages, by the options' names."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import torch

__all__ = ["PRECISIONS"]

PRECISIONS: Final = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})
