"""Schedules of many shapes, for tests that only need some."""

from collections.abc import Collection

from evenpipe.schedule import Program, Queues, Schedule, Size, Stream, find
from evenpipe.schedule import build as build_program

__all__ = ["build", "program", "stream"]


def program(
    name: str,
    stages: int,
    micro_batches: int,
    chunks: int = 1,
    bpipe: bool = False,
    batches: int = 1,
    group_size: int = 1,
    queues: Queues = "many",
) -> Program:
    return build_program(name, Size(stages, micro_batches, chunks, group_size, batches), bpipe, queues)


def build(*arguments: object, **named: object) -> Schedule:
    return program(*arguments, **named).schedule  # type: ignore[arg-type]


def stream(
    stages: int, micro_batches: int, bpipe: bool = False, swaps: Collection[int] = (), queues: Queues = "many"
) -> Stream:
    return Stream(find("2bw"), stages, micro_batches, bpipe, queues, swaps)
