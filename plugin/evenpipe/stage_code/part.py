"""The base class of stage code: its inputs, random numbers and errors."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import linecache
import math
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from evenpipe.partition.trace import is_random
from evenpipe.runtime.node_call import RerunError
from evenpipe.runtime.recompute_swap import PLAIN_CALLER, Keeping, NodeCaller
from evenpipe.schedule import Action, swapped_at_once

__all__ = [
    "Boundary",
    "Draws",
    "Part",
    "Scope",
    "StageCodeError",
    "device_of",
    "drawing",
    "sizes_on_host",
    "users_lines",
]


class StageCodeError(ValueError):
    """A stage's code cannot be written or read; the message is one line that names the file and what to do."""


class Boundary(NamedTuple):
    """One tensor between parts: contiguous. `gradient`: one is sent back for it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool


class Scope(nn.Module):
    """A module of the model, with those of its parameters and buffers that a part uses; `scope[3]` is its child "3"."""

    def __getitem__(self, name: int | str) -> Any:
        return getattr(self, str(name))


class Part(Scope):
    """One part of a model; its `forward` is what the user's code does between two cuts, operation by operation.

    `forward(inputs, draws, keep, *received)` returns what it sends, `SENDS`; of the last part, (loss,).
    `received`: what `RECEIVES` says, in that order. `keep` calls the operations that `KEEPING` names.
    Whatever else it has in small letters is the model's.

    `INPUTS`: the names of the micro-batch's inputs that it reads, `INPUT_SHAPES` and `INPUT_DTYPES` theirs.
    `UNREAD`: of the first part, the inputs of the plan's model that no part reads.
    `RECEIVES`: from the part before; `SENDS`: to the next. `RANDOM`: the ordinals of its random operations. `LAST`: it
    returns the loss. `STATE`: the model's parameters and buffers that it uses. `MODULES`: the model's modules that its
    operations are of, by type. `CONSTANTS`: tensors that the code makes; None: they are saved beside. `KEEPING`: what
    it recomputes and swaps.
    """

    INPUTS: ClassVar[tuple[str, ...]] = ()
    INPUT_SHAPES: ClassVar[tuple[tuple[int, ...], ...]] = ()
    INPUT_DTYPES: ClassVar[tuple[torch.dtype, ...]] = ()
    UNREAD: ClassVar[tuple[str, ...]] = ()
    RECEIVES: ClassVar[tuple[Boundary, ...]] = ()
    SENDS: ClassVar[tuple[Boundary, ...]] = ()
    RANDOM: ClassVar[tuple[int, ...]] = ()
    LAST: ClassVar[bool] = False
    STATE: ClassVar[Mapping[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
    MODULES: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    CONSTANTS: ClassVar[Mapping[str, Tensor | None]] = {}
    KEEPING: ClassVar[Keeping] = Keeping()

    def __call__(
        self, inputs: Mapping[str, Tensor], draws: Draws, *received: Tensor, keep: NodeCaller = PLAIN_CALLER
    ) -> tuple[Tensor, ...]:
        """Run it; with a `keep` of `KEEPING` (`Keeper.forward`), it recomputes and swaps what was planned.

        Raises what `users_lines` does, and ValueError for what it is not made for.
        """
        for name, shape in zip(self.INPUTS, self.INPUT_SHAPES, strict=True):
            if name not in inputs:
                raise ValueError(f"inputs have no {name!r}: the plan was made with {', '.join(self.INPUTS)}")
            if (now := tuple(inputs[name].shape)) != shape:
                raise ValueError(f"input {name!r} is {now}, and the plan was made for {shape}: make one for {now}")
        _check_boundaries(f"{type(self).__name__} receives", self.RECEIVES, received)
        with users_lines(self):
            result: tuple[Tensor, ...] = super().__call__(inputs, draws, keep, *received)
        if not self.LAST:
            _check_boundaries(f"{type(self).__name__} sends", self.SENDS, result)
        return result


@contextlib.contextmanager
def users_lines(part: Part) -> Iterator[None]:
    """An error of the part's operations, also where they run again in a backward, names the user's own file and line.

    It has the type that it had, and that one as its cause.
    """
    try:
        yield
    except Exception as error:
        where = _users_line(error, type(part))
        if where is None:
            raise
        cause = error.__cause__ if isinstance(error, RerunError) else error
        assert isinstance(cause, Exception), "a RerunError is raised from one"
        raise _like(cause, where) from cause


def device_of(part: Part, inputs: Mapping[str, Tensor], received: Sequence[Tensor]) -> torch.device:
    """Return where a part runs."""
    return next(tensor.device for tensor in chain(received, part.parameters(), part.buffers(), inputs.values()))


def sizes_on_host(parts: Sequence[Part], row: Sequence[Action]) -> list[int]:
    """Return the bytes of all that a stage has on its host at once, storage by storage: its parts, and its actions."""
    sizes, at_once = list[int](), swapped_at_once(row)
    for chunk, part in enumerate(parts):
        received = [math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in part.RECEIVES]
        sizes += at_once.get(chunk, 0) * part.KEEPING.sizes_on_host(received)
    return sizes


def _check_boundaries(verb: str, boundaries: Sequence[Boundary], tensors: Sequence[Tensor]) -> None:
    if len(tensors) != len(boundaries):
        raise ValueError(f"{verb} {len(tensors)} tensors, and the plan has {len(boundaries)}")
    for planned, tensor in zip(boundaries, tensors, strict=True):
        if (tuple(tensor.shape), tensor.dtype) != (planned.shape, planned.dtype):
            raise ValueError(
                f"{verb} {planned.name!r} as {tuple(tensor.shape)}, {tensor.dtype}, and the plan has {planned.shape}, "
                f"{planned.dtype}: make a plan under the same torch.autocast, of a model with parameters and inputs of "
                "these types"
            )


#: A comment of stage code that names a line of the user's.
_PLACE: Final = re.compile(r"\s*# (\S.*):(\d+): (.*)")


def _users_line(error: BaseException, part: type[Part]) -> str | None:
    """Return `FILE:LINE: \\`code\\``, which the comment before the statement that raised names."""
    file = inspect.unwrap(part.forward).__code__.co_filename
    for number in range(_line_in(file, error), 0, -1):
        if place := _PLACE.fullmatch(linecache.getline(file, number).rstrip("\n")):
            name, line, code = place.groups()
            return f"{part.forward.__globals__['FILES'].get(name, name)}:{line}: `{code}`"
    return None


def _line_in(file: str, error: BaseException) -> int:
    """Return the line of the stage code that raised it, or that called what runs again; 0: of another file."""
    if isinstance(error, RerunError):
        code = "".join(linecache.getlines(file))
        call = re.search(rf"\bkeep\(\s*{error.node},", code)
        return code.count("\n", 0, call.end()) + 1 if call else 0
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno or 0 for frame in frames if frame.filename == file), 0)


def _like(error: Exception, where: str) -> Exception:
    reason = next(iter(str(error).strip().splitlines()), "")
    try:
        return type(error)(f"{where}: {reason or type(error).__name__}")
    except Exception:  # its type takes other arguments
        return RuntimeError(f"{where}: {type(error).__name__}: {reason}")


class Draws:
    """The random numbers of one micro-batch; `with draws(ordinal):` those of the model's ordinal-th random operation.

    They depend on the micro-batch and the operation alone: not on cuts, schedule or recomputation. Ordinals count from
    0 in the order of the model's own execution.
    """

    def __init__(self, seed: int, micro_batch: int) -> None:
        """`seed`: of the run; `micro_batch`: its number in the run, so that no two draw the same."""
        self.seed = seed
        self.micro_batch = micro_batch

    @contextlib.contextmanager
    def __call__(self, ordinal: int) -> Iterator[None]:
        """Restore the default generators, of the CPU and of the current GPU, afterwards."""
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        current = [torch.cuda.default_generators[torch.cuda.current_device()]] if on_gpu else []
        generators = [torch.default_generator, *current]
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
        if not is_random(function, args, kwargs):
            return function(*args, **kwargs)
        with self._draws(self._ordinal):
            self._ordinal += 1
            return function(*args, **kwargs)
