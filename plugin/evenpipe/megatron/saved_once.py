"""A tensor that a rank holds twice is saved once, and loaded into both.

In a V the first stage has the embedding and, in its last chunk, the copies of it that output layer and multi-token
prediction compute with. Megatron has them, and their optimizer's states, under one name in a checkpoint, and takes it
for granted that copies are on several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from evenpipe.megatron.supported import core_patch
from evenpipe.upstream import PRESENT, Patch

__all__ = ["saved_once"]

_SERIALIZATION: Final = "megatron.core.dist_checkpointing.serialization"
_REASON: Final = "Megatron's checkpoints take it for granted that copies of a tensor are on several ranks"


def saved_once() -> list[Patch]:
    """Return the patches of Megatron's distributed checkpoints."""
    return [
        core_patch("save", f"{_SERIALIZATION}:save", _save, _REASON, PRESENT, rebinds=True),
        core_patch("load", f"{_SERIALIZATION}:load", _load, _REASON, PRESENT, rebinds=True),
    ]


class _Copy(NamedTuple):
    """A tensor at the end of the path `of`, in nested dictionaries and lists, that is at the end of `first` too."""

    of: tuple[Any, ...]
    first: tuple[Any, ...]


def _save(original: Callable[..., Any], sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    state, _ = _without_copies(sharded_state_dict)
    return original(state, *args, **kwargs)


def _load(original: Callable[..., Any], sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    state, copies = _without_copies(sharded_state_dict)
    loaded = original(state, *args, **kwargs)
    found = loaded[0] if isinstance(loaded, tuple) else loaded  # beside what was missing, if it was asked for
    for path in sorted((copy.of for copy in copies), key=lambda path: [(isinstance(key, str), key) for key in path]):
        _make_room(found, path)
    for copy in copies:
        _at(found, copy.of[:-1])[copy.of[-1]] = _at(found, copy.first).clone()  # an optimizer changes each
    return loaded


def _without_copies(state: Any) -> tuple[Any, list[_Copy]]:
    """Return the same without the copies, and where these were."""
    same: dict[Any, list[tuple[Any, tuple[Any, ...]]]] = {}
    for path, tensor in _tensors(state, ()):
        part = getattr(tensor, "flattened_range", None)
        place = tensor.key, tensor.global_offset, tensor.local_shape, part and (part.start, part.stop)
        same.setdefault(place, []).append((tensor.replica_id, path))
    ordered = [sorted(found, key=lambda one: one[0]) for found in same.values()]  # the embedding's own is written
    copies = [_Copy(path, found[0][1]) for found in ordered for _, path in found[1:]]
    return _without(state, {copy.of for copy in copies}, ()), copies


def _tensors(state: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield each sharded tensor after its path."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    for key, value in _items(state):
        if isinstance(value, ShardedTensor):
            yield (*path, key), value
        else:
            yield from _tensors(value, (*path, key))


def _items(state: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(state, dict):
        yield from state.items()
    elif isinstance(state, list):
        yield from enumerate(state)


def _without(state: Any, copies: set[tuple[Any, ...]], path: tuple[Any, ...]) -> Any:
    """Return `state` without what is at those paths, and with its own dictionaries and lists elsewhere."""
    if not any(copy[: len(path)] == path for copy in copies):
        return state
    left = {key: _without(value, copies, (*path, key)) for key, value in _items(state) if (*path, key) not in copies}
    return left if isinstance(state, dict) else [*left.values()]


def _at(state: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        state = state[key]
    return state


def _make_room(state: Any, path: tuple[Any, ...]) -> None:
    """Have there be something at that path, where a dictionary of which nothing was left may be missing."""
    for key in path[:-1]:
        state = state.setdefault(key, {}) if isinstance(state, dict) else state[key]
    if isinstance(state, list):
        state.insert(path[-1], None)
