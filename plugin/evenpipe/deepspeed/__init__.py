"""The only room that names DeepSpeed: its pipeline engine, topology and configuration under EvenPipe.

Importing it changes nothing. A section "evenpipe" of DeepSpeed's configuration takes effect in a script that asks for
it, before it calls `deepspeed.initialize`::

    import evenpipe.deepspeed
    evenpipe.deepspeed.install()

Without such a section, it runs as if these lines were not there.
"""

from evenpipe.deepspeed.start import install

__all__ = ["install"]
