"""What devices can do, by their makers' data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

__all__ = ["DEVICES", "Device", "DeviceError", "device"]


class DeviceError(ValueError):
    """A device is not known, or cannot do what is asked for; the message is one line."""


class Device(NamedTuple):
    """A GPU. `tflops`: 10^12 operations/s by precision, dense; `memory_gbps`, `host_gbps`: 10^9 bytes/s to its own
    memory and, one way, to the host's. `launch_us`: what a kernel takes at least in PyTorch without graphs.
    """

    name: str
    tflops: Mapping[str, float]
    memory_gib: float
    memory_gbps: float
    host_gbps: float
    launch_us: float


# 3 to 5 µs from one kernel's launch to the next are what profiles of eager PyTorch show on all of these, as the host
# sets it rather than the device; not measured here.
_LAUNCH_US: Final = 4.0

# PCI Express ×16, one way, by its specification: 128b/130b coded 8, 16 and 32 GT/s a lane.
_PCIE3_GBPS: Final = 15.75
_PCIE4_GBPS: Final = 31.5
_PCIE5_GBPS: Final = 63.0

# fp32 is TF32 on tensor cores where the device has them; rates with sparsity, which data sheets of Hopper and Blackwell
# lead with, are halved.
_A100: Final = {"fp32": 156.0, "bf16": 312.0, "fp16": 312.0}  # "NVIDIA A100 Tensor Core GPU" data sheet, 2021
_V100: Final = {"fp32": 15.7, "fp16": 125.0}  # "NVIDIA V100" data sheet, 2020, SXM2; it computes no bf16
_H100: Final = {"fp32": 494.5, "bf16": 989.5, "fp16": 989.5}  # "NVIDIA H100 Tensor Core GPU" data sheet, 2023, SXM
_B200: Final = {"fp32": 1125.0, "bf16": 2250.0, "fp16": 2250.0}  # "NVIDIA HGX B200" data sheet, 2025, an eighth of it
# "GeForce GTX 1080 Ti" specification, 2017, at the boost clock. Its fp16 units are slower than fp32's by 64, so cuBLAS
# computes half precision in fp32.
_1080TI: Final = {"fp32": 11.3, "fp16": 11.3}

DEVICES: Final[Mapping[str, Device]] = {
    it.name: it
    for it in (
        Device("a100-40gb", _A100, 40, 1555, _PCIE4_GBPS, _LAUNCH_US),
        Device("a100-80gb", _A100, 80, 2039, _PCIE4_GBPS, _LAUNCH_US),
        Device("h100", _H100, 80, 3350, _PCIE5_GBPS, _LAUNCH_US),
        Device("h200", _H100, 141, 4800, _PCIE5_GBPS, _LAUNCH_US),  # "NVIDIA H200" data sheet, 2024, SXM
        Device("b200", _B200, 180, 8000, _PCIE5_GBPS, _LAUNCH_US),
        Device("v100-16gb", _V100, 16, 900, _PCIE3_GBPS, _LAUNCH_US),
        Device("v100-32gb", _V100, 32, 900, _PCIE3_GBPS, _LAUNCH_US),
        Device("1080ti", _1080TI, 11, 484, _PCIE3_GBPS, _LAUNCH_US),
    )
}


def device(name: str) -> Device:
    """The device of that name. Raises DeviceError."""
    if name not in DEVICES:
        raise DeviceError(f"no device {name!r}: there are {', '.join(DEVICES)}")
    return DEVICES[name]
