"""Switches CPU mode on in a process that has yet to import Megatron."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, MutableMapping

from evenpipe.megatron.cpu_mode.core import cpu_mode
from evenpipe.megatron.cpu_mode.modules import (
    DATASETS,
    EXPERTS,
    stand_in_for_triton_kernels,
    take_dataset_helpers_from_the_wheel,
    without_transformer_engine,
)
from evenpipe.megatron.cpu_mode.scripts import script_patches
from evenpipe.runtime.processes import rest_at_exit
from evenpipe.upstream.ending import apply_or_end
from evenpipe.upstream.imports import when_imported

__all__ = ["install_cpu_mode"]


def install_cpu_mode(as_given: bool = False) -> None:
    """Prepare this process for Megatron on CPU: nothing is imported, each patch is applied once its module has been.

    `as_given`: a script's arguments stay what they are on a GPU, since nothing is trained with them.

    What must not be patched, such as a machine with CUDA or an unknown release, ends the job with one line.
    """
    _set_environment(os.environ)
    _compile_nothing(os.environ)
    rest_at_exit()
    stand_in_for_triton_kernels()
    when_imported(DATASETS, take_dataset_helpers_from_the_wheel)
    when_imported(EXPERTS, without_transformer_engine)
    when_imported("megatron.core", functools.partial(apply_or_end, cpu_mode()))
    for module, patches in script_patches(as_given).items():
        when_imported(module, functools.partial(apply_or_end, patches))


def _set_environment(environ: MutableMapping[str, str]) -> None:
    """Set what CPU runs need and the user has not set."""
    # Megatron-LM asks for it with tensor parallelism, whatever the device.
    environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Megatron compiles its small fused functions at their first call: minutes, and a C++ compiler, for nothing on CPU.
    environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    one_machine = environ.get("LOCAL_WORLD_SIZE", "1") == environ.get("WORLD_SIZE", "1")
    if sys.platform == "linux" and one_machine:
        # gloo otherwise listens where the host's name leads, which need not be reachable from the host itself.
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _compile_nothing(environ: Mapping[str, str]) -> None:
    """Have torch go by TORCHDYNAMO_DISABLE even where it read that before it was set."""
    if environ.get("TORCHDYNAMO_DISABLE") == "1" and "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.set_stance("force_eager")
