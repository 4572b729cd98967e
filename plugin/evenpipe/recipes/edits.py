"""A line of Megatron-LM's with another run: only the flags that say something else are changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Final

from evenpipe.descriptions import Model
from evenpipe.planner.run import Run
from evenpipe.recipes.line import Line
from evenpipe.recipes.megatron import run_flags
from evenpipe.recipes.surroundings import megatron_flags

__all__ = ["edited", "flag_changes"]

_ALLOCATOR: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE: Final = "expandable_segments:True"
_KEEPS_WEIGHTS: Final = "NVTE_CPU_OFFLOAD_V1"
_SWAPS: Final = "evenpipe-swap"
_QUEUES: Final = "CUDA_DEVICE_MAX_CONNECTIONS"


def edited(line: Line, model: Model, old: Run, new: Run, environment: Mapping[str, str]) -> Line:
    """Return the line that starts ``new``, where ``line`` starts ``old``; another run swaps nothing.

    environment: of whom starts it, beside the variables of the line.
    """
    before, after = _written(model, old), _written(model, new)
    given = [words for words in _given(line.flags) if new == old or _name(words) != _SWAPS]
    for names in megatron_flags()["together"]:
        wanted = {name: after[name] for name in names if name in after}
        if wanted != {name: before[name] for name in names if name in before}:
            given = list(_replaced(given, names, wanted))
    changed = Line(line.before, line.script, tuple(chain.from_iterable(given)))
    if new.blocking == () and old.blocking != ():
        changed = changed.by_evenpipe()
    if new.expandable_segments and not old.expandable_segments:
        changed = _expandable(changed, environment)
    if new.offload_modules and not old.offload_modules and not _known(_KEEPS_WEIGHTS, changed, environment):
        changed = changed.with_variable(_KEEPS_WEIGHTS, "1")  # which Megatron asks for from Transformer Engine 2.10 on
    divided = max(new.tensor, new.context) > 1 >= max(old.tensor, old.context)
    if divided and not _known(_QUEUES, changed, environment):
        changed = changed.with_variable(_QUEUES, "1")  # which Megatron asks for with tensor or context parallelism
    return changed


def _known(name: str, line: Line, environment: Mapping[str, str]) -> bool:
    return name in environment or line.variable(name) is not None


def _written(model: Model, run: Run) -> dict[str, tuple[str, ...]]:
    return {name: values for name, *values in run_flags(model, run)}  # type: ignore[misc]


def _expandable(line: Line, environment: Mapping[str, str]) -> Line:
    """Return the line with that option of the allocator, beside those that it is given."""
    for name in _ALLOCATOR:
        value = line.variable(name) or environment.get(name)
        if value is not None:
            others = [one for one in value.split(",") if not one.lower().startswith("expandable_segments")]
            without = tuple(word for word in line.before if not word.startswith(f"{name}="))
            return Line(without, line.script, line.flags).with_variable(name, ",".join((*others, _EXPANDABLE)))
    return line.with_variable(_ALLOCATOR[0], _EXPANDABLE)


def _given(flags: Iterable[str]) -> list[tuple[str, ...]]:
    """Return each flag with its values, as they were typed."""
    found: list[tuple[str, ...]] = []
    for word in flags:
        if word.startswith("--") or not found:
            found.append((word,))
        else:
            found[-1] = (*found[-1], word)
    return found


def _name(words: tuple[str, ...]) -> str:
    return words[0].partition("=")[0].removeprefix("--")


def _values(words: tuple[str, ...]) -> tuple[str, ...]:
    _, sign, value = words[0].partition("=")
    return (value,) if sign else words[1:]


def _replaced(
    given: Iterable[tuple[str, ...]], names: tuple[str, ...], wanted: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, ...]]:
    """Yield the flags with those of ``names`` as they are wanted: in their places, or at the end."""
    left = dict(wanted)
    for words in given:
        name = _name(words)
        if name not in names:
            yield words
        elif name in left:
            values = tuple(left.pop(name))
            yield words if _values(words) == values else (f"--{name}", *values)
    yield from ((f"--{name}", *values) for name, values in left.items())


def flag_changes(old: Line, new: Line) -> int:
    """Return how many flags and variables of the line are changed; to start it through EvenPipe is one."""
    before, after = set(_given(old.flags)), set(_given(new.flags))
    flags = {_name(words) for words in before ^ after}
    return len(flags) + len(set(new.before) - set(old.before) - {"-m", "run", "--module", "python", "--no_local_rank"})
