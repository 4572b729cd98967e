"""The only room that names Megatron: its schedules, optimizers, arguments and checkpoints under EvenPipe.

Importing it changes nothing. A script of Megatron-LM that asks for EvenPipe before its other imports knows its flags::

    import evenpipe.megatron
    evenpipe.megatron.install()

With none of them given, it runs as if these lines were not there.
"""

from evenpipe.megatron.script.install import install

__all__ = ["install"]
