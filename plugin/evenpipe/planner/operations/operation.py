"""What a part of a model consists of: operations, as one GPU carries them out, and what each of them keeps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

__all__ = [
    "Collective",
    "FusedAttention",
    "Gemm",
    "Group",
    "Moved",
    "Operation",
    "Parameters",
    "Work",
    "summed",
    "total",
]

#: Over which ranks a collective goes.
Group = Literal["tensor", "expert", "context"]


class Gemm(NamedTuple):
    """``batch`` matrix products of (m × k) and (k × n)."""

    m: float
    n: float
    k: float
    batch: float = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.batch


class FusedAttention(NamedTuple):
    """Scores, softmax and context in one kernel: operations that are computed, those that a mask spares left out."""

    flops: float
    backward: bool


class Moved(NamedTuple):
    """``nbytes`` that element-wise kernels read and write; ``unfused``: by those of a softmax that is not fused."""

    nbytes: float
    kernels: int = 1
    unfused: bool = False


class Collective(NamedTuple):
    """``nbytes`` that each rank sends on the bus of its group, while ``behind`` is computed, if anything."""

    nbytes: float
    group: Group
    behind: Gemm | None = None


Work: TypeAlias = Gemm | FusedAttention | Moved | Collective


class Parameters(NamedTuple):
    """Numbers of parameters on one GPU: of what every data-parallel rank has, and of experts."""

    shared: float = 0
    expert: float = 0

    @property
    def all(self) -> float:
        return self.shared + self.expert


@dataclass(frozen=True)
class Operation:
    """``forward`` and ``backward``: what is carried out, in which ``weight_gradient`` are the works that nobody waits
    for. ``saved_bytes``: kept from forward to backward; ``scratch_bytes``: taken while its backward runs; ``core``: of
    attention, which selective recomputation carries out again.
    """

    name: str
    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    weight_gradient: tuple[Work, ...] = ()
    parameters: Parameters = field(default=Parameters())
    saved_bytes: float = 0
    scratch_bytes: float = 0
    core: bool = False


def summed(parameters: Iterable[Parameters]) -> Parameters:
    """All of them together."""
    found = list(parameters)
    return Parameters(sum(one.shared for one in found), sum(one.expert for one in found))


def total(operations: Iterable[Operation]) -> Parameters:
    """The parameters of all of them."""
    return summed(one.parameters for one in operations)
