"""Patches of a script's training loop: calls when model and optimizer are made, and in the place of every saving."""

from __future__ import annotations

import functools
import inspect
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from evenpipe.megatron.symbols import training_patch
from evenpipe.upstream import Patch

__all__ = ["Training", "folder_of", "folders_loaded_from", "save_patch", "set_up_patch", "with_values"]


class Training(Protocol):
    """The object whose methods the patches call, on all ranks; `args` are Megatron's."""

    args: Namespace

    def set_up(self, model: Sequence[Any], optimizer: Any) -> None:
        """Megatron has made both, and loaded what was to be loaded; no optimizer with --skip-train."""

    def save(self, iteration: int, model: Sequence[Any], folder: str, write: Callable[[], Any]) -> Any:
        """In the place of Megatron's saving, which is `write`, to a folder that is one for all ranks."""


def set_up_patch(training: Training, name: str, reason: str) -> Patch:
    """Calls `training.set_up`."""
    call = functools.partial(_set_up, training)
    return training_patch(name, "megatron.training.training:setup_model_and_optimizer", call, reason)


def save_patch(training: Training, reason: str) -> Patch:
    """Calls `training.save`, but for checkpoints that every node keeps for itself."""
    call = functools.partial(_save, training)
    return training_patch("save", "megatron.training.checkpointing:save_checkpoint", call, reason)


def _set_up(training: Training, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    model, optimizer, scheduler = original(*args, **kwargs)
    training.set_up(model, optimizer)
    return model, optimizer, scheduler


def _save(training: Training, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    write, non_persistent = functools.partial(original, *args, **kwargs), given.arguments["non_persistent_ckpt"]
    if non_persistent and training.args.non_persistent_ckpt_type == "local":
        return write()
    folder = folder_of(training.args, non_persistent)
    return training.save(given.arguments["iteration"], given.arguments["model"], folder, write)


@contextmanager
def with_values(args: Namespace, **values: Any) -> Iterator[None]:
    """Within it Megatron's `args` have these values."""
    before = {name: getattr(args, name) for name in values}
    vars(args).update(values)
    try:
        yield
    finally:
        vars(args).update(before)


def folder_of(args: Namespace, non_persistent: bool) -> str:
    """Return where Megatron puts the folders of its checkpoints."""
    if not non_persistent:
        return str(args.save)
    return str(args.non_persistent_global_ckpt_dir or os.path.join(args.save, "non_persistent"))


def folders_loaded_from(args: Namespace) -> list[str]:
    """Return where Megatron has looked for what it loaded."""
    return [
        folder
        for folder in (args.load, os.path.join(args.load, "non_persistent"), args.non_persistent_global_ckpt_dir)
        if folder
    ]
