"""The patches under which megatron-core itself trains on CPU."""

from __future__ import annotations

from evenpipe.megatron.cpu_mode.checkpoints import checkpoint_patches
from evenpipe.megatron.cpu_mode.devices import device_patches
from evenpipe.megatron.cpu_mode.norms import norm_patches
from evenpipe.megatron.cpu_mode.patching import no_gpu
from evenpipe.megatron.cpu_mode.random_state import random_patches
from evenpipe.megatron.cpu_mode.sends import send_patches
from evenpipe.megatron.cpu_mode.streams import stream_patches
from evenpipe.upstream import PatchSet

__all__ = ["cpu_mode"]


def cpu_mode(device: str = "cpu") -> PatchSet:
    """The patches that make megatron-core train on CPU; nothing changes before `apply()` is called on them.

    With `device` "meta" models have shapes but neither memory nor values: to find out what they would take.

    Apply them before the first model is built. Refused where CUDA is available: with them in place, tensors stay on the
    CPU and the "CUDA" random state is the CPU's.
    """
    patches = [
        *device_patches(device),
        *random_patches(),
        *stream_patches(),
        *send_patches(),
        *norm_patches(),
        *checkpoint_patches(),
    ]
    return PatchSet("cpu-mode", patches, guard=no_gpu)
