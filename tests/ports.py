"""A port for a launcher that opens it a while after it was told which."""

import random
import socket

__all__ = ["free_port"]

# Where no system takes those of outgoing connections from, so that none of these gets it in between.
_FROM, _TO = 10_000, 30_000


def free_port() -> int:
    """One that nobody listens at."""
    while True:
        port = random.SystemRandom().randrange(_FROM, _TO)
        try:
            with socket.create_server(("localhost", port)):
                return port
        except OSError:
            continue
