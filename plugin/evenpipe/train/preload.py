"""What a fork server imports once, so that every training process starts with it: torch and an engine."""

import contextlib
import gc
import io
import signal
import warnings
from importlib import import_module

__all__ = ["preload"]


def preload(engine: str) -> None:
    """Import the module `engine`, in a fork server that calls this by importing the engine's module `preload`."""
    # A SIGTERM to the whole process group must leave the fork server: without it the agent knows nothing of its
    # processes. These inherit the mask, and take what has come in the meantime when they lift it. Before the imports,
    # for threads.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    # megatron-core warns of every optional package that is missing, in several ways; none of them is needed here.
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        import_module("evenpipe.train.process")
        import_module(engine)
    # What is imported stays: the collector need not walk it in every process (0.8 s a collection, 4 processes on 2
    # cores).
    gc.freeze()
