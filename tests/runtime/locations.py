"""Where processes run, as tests make it up, and what a user reads of it."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from evenpipe.report.bandwidth import ProcessLocation

__all__ = ["printed", "processes"]


def processes(nodes: str, pipeline: int = 0, gbps: float = 10.0) -> list[ProcessLocation]:
    """One pipeline, a stage on each of `nodes`; stage s sends s GB/s faster than stage 0."""
    return [
        ProcessLocation(pipeline + 10 * stage, pipeline, stage, node, "host", 0, gbps + stage, 1e12)
        for stage, node in enumerate(nodes)
    ]


def printed(what: Any) -> list[str]:
    """Its lines on a wide terminal."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(what, soft_wrap=True)
    return capture.get().splitlines()
