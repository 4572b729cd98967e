"""CPU mode: megatron-core and Megatron-LM's scripts on CPU tensors and gloo, to try a configuration without a GPU."""

from evenpipe.megatron.cpu_mode.core import cpu_mode
from evenpipe.megatron.cpu_mode.scripts import adapt_arguments, install_cpu_mode

__all__ = ["adapt_arguments", "cpu_mode", "install_cpu_mode"]
