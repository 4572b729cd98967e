"""Environment variables that a run is better started with, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from evenpipe.recipes.recipe import Recipe

__all__ = ["Exported", "environment_of"]


class Exported(NamedTuple):
    """``reason``: a comment, a line each. ``given_first``: what the environment has already comes before it."""

    name: str
    value: str
    reason: tuple[str, ...]
    given_first: bool = False


def environment_of(recipe: Recipe) -> list[Exported]:
    """In the order of the file."""
    return list(_environment(recipe))


def _environment(recipe: Recipe) -> Iterator[Exported]:
    run = recipe.run
    if run.queues == "one":
        yield Exported(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "1",
            (
                "One queue for kernels: a collective of tensor parallelism starts before the matrix product that hides",
                "it. Megatron asks for it on all GPUs before Blackwell.",
            ),
        )
    elif run.stages > 1:
        yield Exported(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "32",
            ("Compute, each link and each group have a stream. With CUDA's 8 queues some would wait for others.",),
        )
    yield Exported(
        "PYTORCH_CUDA_ALLOC_CONF",
        "expandable_segments:True",
        ("Micro-batches come and go in several sizes: segments that can grow leave fewer gaps.",),
    )
    yield Exported(
        "OMP_NUM_THREADS",
        "4",
        ("CPU threads of a process: with one for each core, a node has eight times too many.",),
        given_first=True,
    )
    if recipe.cluster.nodes > 1:
        yield Exported(
            "NCCL_IB_TIMEOUT",
            "22",
            ("InfiniBand waits 17 s (4.1 µs × 2^22) for a busy switch before it gives a message up.",),
        )
    if recipe.settings.interface:
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            reason = "Nodes have several networks: this is the one between them."
            yield Exported(name, recipe.settings.interface, (reason,) if name.startswith("NCCL") else ())
