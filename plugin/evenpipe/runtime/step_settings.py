"""The optimizer's settings of a batch's own iteration, for a step that is finished in the next one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["as_submitted", "settings_of"]


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What of a parameter group training loops and learning-rate schedules change after every iteration."""
    return {name: group[name] for name in ("lr", "weight_decay", "betas", "momentum") if name in group}


@contextmanager
def as_submitted(groups: Sequence[dict[str, Any]], settings: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Inside, parameter groups have `settings`: a training loop has set those of the next iteration by now."""
    present = [settings_of(group) for group in groups]
    for group, values in zip(groups, settings, strict=True):
        group.update(values)
    try:
        yield
    finally:
        for group, values in zip(groups, present, strict=True):
            group.update(values)
