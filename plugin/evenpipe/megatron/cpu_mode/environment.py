"""The environment in which Megatron trains on CPU."""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping

__all__ = ["compile_nothing", "set_environment"]


def set_environment(environ: MutableMapping[str, str]) -> None:
    """Set what CPU runs need and the user has not set."""
    # Megatron-LM asks for it with tensor parallelism, whatever the device.
    environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Megatron compiles its small fused functions at their first call: minutes, and a C++ compiler, for nothing on CPU.
    environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if sys.platform == "linux" and _one_machine(environ):
        # gloo otherwise listens where the host's name leads, which need not be reachable from the host itself.
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def compile_nothing(environ: Mapping[str, str]) -> None:
    """Have torch go by TORCHDYNAMO_DISABLE even where it read that before it was set."""
    if environ.get("TORCHDYNAMO_DISABLE") == "1" and "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.set_stance("force_eager")


def _one_machine(environ: MutableMapping[str, str]) -> bool:
    return environ.get("LOCAL_WORLD_SIZE", "1") == environ.get("WORLD_SIZE", "1")
