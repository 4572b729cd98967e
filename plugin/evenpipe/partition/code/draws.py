"""Random numbers that depend on the micro-batch and the operation alone: not on cuts, schedule or recomputation."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evenpipe.partition.trace.drawing import draws

__all__ = ["Draws", "drawing"]


class Draws:
    """The random numbers of one micro-batch; `with draws(ordinal):` those of the model's ordinal-th random operation.

    Ordinals count from 0 in the order of the model's own execution.
    """

    def __init__(self, seed: int, micro_batch: int) -> None:
        """`seed`: of the run; `micro_batch`: its number in the run, so that no two draw the same."""
        self.seed = seed
        self.micro_batch = micro_batch

    @contextlib.contextmanager
    def __call__(self, ordinal: int) -> Iterator[None]:
        """The default generators, of the CPU and of the current GPU, are as they were afterwards."""
        generators = _generators()
        before = [generator.get_state() for generator in generators]
        name = f"{self.seed}/{self.micro_batch}/{ordinal}".encode()
        number = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1
        try:
            for generator in generators:
                generator.manual_seed(number)
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)


def drawing(seed: int, micro_batch: int) -> TorchDispatchMode:
    """Inside, a model that is not cut draws the numbers that its parts draw for that micro-batch."""
    return _Drawing(Draws(seed, micro_batch))


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, of: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = of
        self._ordinal = 0

    def __torch_dispatch__(
        self, function: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not draws(function, args, kwargs):
            return function(*args, **kwargs)
        with self._draws(self._ordinal):
            self._ordinal += 1
            return function(*args, **kwargs)


def _generators() -> list[torch.Generator]:
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.default_generator, *([torch.cuda.default_generators[torch.cuda.current_device()]] if on_gpu else [])]
