"""Megatron-core under EvenPipe: its schedules, optimizers and stages. Megatron-LM's scripts: `megatron_lm`.

Importing it changes nothing. A script of Megatron-LM that asks for EvenPipe before its other imports knows its flags::

    import evenpipe.megatron
    evenpipe.megatron.install()

With none of them given, it runs as if these lines were not there.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evenpipe.megatron_lm.install import Listener

__all__ = ["install"]


def install(listener: "Listener | None" = None) -> None:
    """Prepare this process for a script of Megatron-LM, as `evenpipe.megatron_lm.install` says."""
    from evenpipe.megatron_lm.install import install as prepare

    prepare(listener)
