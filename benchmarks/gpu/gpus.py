"""How many GPUs torch can use here; and if none, why, which is not always that there is none."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import torch

from .report import said

__all__ = ["usable", "why_none"]


def usable() -> tuple[int, str]:
    """Their number, and what torch warned of as it counted them: a driver that is too old, say."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [re.match(r"CUDA initialization: (.+?)\.?($| Please | \(Triggered|\n)", str(one.message)) for one in caught]
    return count, next((match[1] for match in found if match), "")


def why_none(warned: str) -> str:
    """One line: that torch finds no GPU, and where the machine has one, what does not fit, and what to do."""
    line = f"torch {torch.__version__} finds no GPU here"
    driver = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    if not (driver or warned or Path("/dev/nvidia0").exists()):
        return line
    line += f", though there is one with driver {driver or 'unknown'}: "
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        return line + "this torch is built without CUDA: install a build for a CUDA that the driver knows"
    if visible is not None and not warned:
        return line + f"CUDA_VISIBLE_DEVICES={visible!r} may hide it: unset it"
    cause = f" ({warned})" if warned else ""
    line += f"it does not serve this torch, which is built for CUDA {torch.version.cuda}{cause}: "
    return line + "update the driver, or install a torch built for the driver's CUDA (nvidia-smi shows it)"
