"""What the classes of stage code have in common."""

from __future__ import annotations

import inspect
import linecache
import math
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor, nn

from evenpipe.partition.code.draws import Draws
from evenpipe.runtime.node_call import RerunError
from evenpipe.runtime.recompute_swap import PLAIN_CALLER, Keeping, NodeCaller
from evenpipe.schedule import Action, swapped_at_once

__all__ = ["Boundary", "Part", "Scope", "device_of", "sizes_on_host", "users_lines"]


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
        """Runs it; with a `keep` of `KEEPING` (`Keeper.forward`), it recomputes and swaps what was planned.

        Raises what `users_lines` does, and ValueError for what it is not made for.
        """
        _check(self, inputs, received)
        with users_lines(self):
            result: tuple[Tensor, ...] = super().__call__(inputs, draws, keep, *received)
        if not self.LAST:
            _check_boundaries(f"{type(self).__name__} sends", self.SENDS, result)
        return result


@contextmanager
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
    """Where a part runs."""
    return next(one.device for held in (received, part.parameters(), part.buffers(), inputs.values()) for one in held)


def sizes_on_host(parts: Sequence[Part], row: Sequence[Action]) -> list[int]:
    """Return the bytes of all that a stage has on its host at once, storage by storage: its parts, and its actions."""
    sizes, at_once = list[int](), swapped_at_once(row)
    for chunk, part in enumerate(parts):
        received = [math.prod(one.shape) * one.dtype.itemsize for one in part.RECEIVES]
        sizes += at_once.get(chunk, 0) * part.KEEPING.sizes_on_host(received)
    return sizes


def _check(part: Part, inputs: Mapping[str, Tensor], received: Sequence[Tensor]) -> None:
    for name, shape in zip(part.INPUTS, part.INPUT_SHAPES, strict=True):
        if name not in inputs:
            raise ValueError(f"inputs have no {name!r}: the plan was made with {', '.join(part.INPUTS)}")
        if tuple(inputs[name].shape) != shape:
            found = tuple(inputs[name].shape)
            raise ValueError(f"input {name!r} is {found}, and the plan was made for {shape}: make one for {found}")
    _check_boundaries(f"{type(part).__name__} receives", part.RECEIVES, received)


def _check_boundaries(verb: str, boundaries: Sequence[Boundary], tensors: Sequence[Tensor]) -> None:
    planned = [(one.shape, one.dtype) for one in boundaries]
    found = [(tuple(one.shape), one.dtype) for one in tensors]
    if len(found) != len(planned):
        raise ValueError(f"{verb} {len(found)} tensors, and the plan has {len(planned)}")
    for boundary, is_one, was in zip(boundaries, found, planned, strict=True):
        if is_one != was:
            raise ValueError(
                f"{verb} {boundary.name!r} as {is_one[0]}, {is_one[1]}, and the plan has {was[0]}, {was[1]}: make a "
                "plan under the same torch.autocast, of a model with parameters and inputs of these types"
            )


#: A comment of stage code that names a line of the user's.
_PLACE: Final = re.compile(r"\s*# (\S.*):(\d+): (.*)")


def _users_line(error: BaseException, part: type[Part]) -> str | None:
    """`FILE:LINE: \\`code\\``, which the comment before the statement that raised names."""
    file = inspect.unwrap(part.forward).__code__.co_filename
    for number in range(_line_in(file, error), 0, -1):
        if place := _PLACE.fullmatch(linecache.getline(file, number).rstrip("\n")):
            name, line, code = place.groups()
            return f"{part.forward.__globals__['FILES'].get(name, name)}:{line}: `{code}`"
    return None


def _line_in(file: str, error: BaseException) -> int:
    """The line of the stage code in which it was raised, or that called what runs again; 0: of another file."""
    if isinstance(error, RerunError):
        code = "".join(linecache.getlines(file))
        found = re.search(rf"\bkeep\(\s*{error.node},", code)
        return code.count("\n", 0, found.end()) + 1 if found else 0
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno or 0 for frame in frames if frame.filename == file), 0)


def _like(error: Exception, where: str) -> Exception:
    reason = next(iter(str(error).strip().splitlines()), "")
    try:
        return type(error)(f"{where}: {reason or type(error).__name__}")
    except Exception:  # its type takes other arguments
        return RuntimeError(f"{where}: {type(error).__name__}: {reason}")
