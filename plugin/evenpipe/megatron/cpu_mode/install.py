"""Switches CPU mode on in a process that has yet to import Megatron."""

from __future__ import annotations

import functools
import os

from evenpipe.megatron.cpu_mode.core import cpu_mode
from evenpipe.megatron.cpu_mode.environment import compile_nothing, set_environment
from evenpipe.megatron.cpu_mode.modules import (
    DATASETS,
    stand_in_for_triton_kernels,
    take_dataset_helpers_from_the_wheel,
)
from evenpipe.megatron.cpu_mode.scripts import script_patches
from evenpipe.upstream.ending import apply_or_end
from evenpipe.upstream.imports import when_imported

__all__ = ["install_cpu_mode"]


def install_cpu_mode() -> None:
    """Prepare this process for Megatron on CPU: nothing is imported, each patch is applied once its module has been.

    What must not be patched, such as a machine with CUDA or an unknown release, ends the job with one line.
    """
    set_environment(os.environ)
    compile_nothing(os.environ)
    stand_in_for_triton_kernels()
    when_imported(DATASETS, take_dataset_helpers_from_the_wheel)
    when_imported("megatron.core", functools.partial(apply_or_end, cpu_mode()))
    for module, patches in script_patches().items():
        when_imported(module, functools.partial(apply_or_end, patches))
