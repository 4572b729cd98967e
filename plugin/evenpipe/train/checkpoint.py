"""Checkpoints on disk: a folder each, complete from the moment it has its name, and a file that names the latest.

DIR/latest                         iter_0000010
DIR/iter_0000010/checkpoint.json   format, iterations done, framework, options, size of every file
DIR/iter_0000010/rank_00000.pt     what one process needs to go on
DIR/iter_0000015.partial/          being written, or left by a process that was killed: never loaded
DIR/iter_0000010.replaced/         makes room for another of its name, and comes back if that never arrives
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from evenpipe.report.files import check_writable, move_durably, write_durably
from evenpipe.settings.spelling import command_flag
from evenpipe.train.engines import ENGINES
from evenpipe.train.options import OptionsError, TrainOptions

__all__ = ["Checkpoint", "Draft", "check", "find", "rank_file", "refuse_misfit"]

_FORMAT: Final = "evenpipe.checkpoint/1"
_LATEST: Final = "latest"
_MANIFEST: Final = "checkpoint.json"
#: What parameters and optimizer state there are, and which process has them.
_MUST_AGREE: Final = (
    "model",
    "layers",
    "hidden",
    "heads",
    "seq_length",
    "untie_embeddings",
    "experts",
    "expert_parallel",
    "stages",
    "data_parallel",
    "tensor_parallel",
    "chunks",
    "precision",
    "optimizer",
    "distributed_optimizer",
)


class Checkpoint(NamedTuple):
    """A complete checkpoint: its folder, how many iterations it has behind it, and what must agree with a run's."""

    folder: Path
    iterations: int
    framework: str
    options: dict[str, object]


class Draft:
    """The checkpoint after `iterations` iterations, while it is being written in `directory`.

    One process calls `begin` before and `complete` after all have called `write`; `discard` takes the place of
    `complete` when one of them failed. All raise OSError.
    """

    def __init__(self, directory: Path, iterations: int) -> None:
        self.final = directory / f"iter_{iterations:07d}"
        self.partial = self.final.with_suffix(".partial")
        self._directory = directory
        self._iterations = iterations

    def begin(self) -> None:
        """An empty draft, and nothing else that is half-written."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for left_over in self._directory.glob("iter_*.partial"):
            shutil.rmtree(left_over)
        _settle(self._directory)
        self.partial.mkdir()

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        """A file of the checkpoint, safely on disk when this returns."""
        write_durably(self.partial / name, fill)

    def discard(self) -> None:
        """As if it had never been begun."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def complete(self, options: TrainOptions) -> None:
        """All files are there: the draft becomes a checkpoint, and then the latest."""
        manifest = {
            "format": _FORMAT,
            "iteration": self._iterations,
            "framework": ENGINES[options.engine].framework,
            "options": {name: getattr(options, name) for name in _MUST_AGREE},
            "files": {path.name: path.stat().st_size for path in sorted(self.partial.iterdir())},
        }
        self.write(_MANIFEST, lambda file: file.write(json.dumps(manifest, indent=1).encode()))
        replaced = self.final.with_suffix(".replaced")
        if self.final.exists():
            self.final.rename(replaced)
        move_durably(self.partial, self.final)
        write_durably(self._directory / _LATEST, lambda file: file.write(f"{self.final.name}\n".encode()))
        shutil.rmtree(replaced, ignore_errors=True)


def check(options: TrainOptions) -> None:
    """Find out before any process starts whether --load can be gone on from and --save be written to, which it makes.

    Raises OptionsError.
    """
    if options.load is not None:
        refuse_misfit(options, find(Path(options.load)))
    if options.save is not None:
        directory = Path(options.save)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            reason = check_writable(directory / _LATEST)
        except OSError as error:
            reason = f"cannot be made ({error.strerror}): name another"
        if reason is not None:
            raise OptionsError(f"--save {directory}: {reason}")


def find(directory: Path) -> Checkpoint:
    """The latest checkpoint in `directory`, or the one that `directory` itself is.

    Raises OptionsError, of --load, where there is none or where it is damaged.
    """
    if (directory / _MANIFEST).is_file():
        return _read(directory)
    try:
        folder = directory / (directory / _LATEST).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise OptionsError(
            f"--load {directory}: no checkpoint there ({_LATEST}: {error.strerror}): "
            "name a folder that --save has written to, or leave --load out"
        ) from None
    return _read(folder if folder.is_dir() else folder.with_suffix(".replaced"))


def refuse_misfit(options: TrainOptions, checkpoint: Checkpoint) -> None:
    """Raise OptionsError, naming flag and values, where a run with `options` cannot go on from `checkpoint`."""
    if checkpoint.framework != ENGINES[options.engine].framework:
        engine = next(name for name, package in ENGINES.items() if package.framework == checkpoint.framework)
        raise OptionsError(
            f"--engine {options.engine}: {checkpoint.folder} was saved with --engine {engine}: "
            "use that, or another --load"
        )
    for name, saved in checkpoint.options.items():
        mine = getattr(options, name)
        if mine != saved:
            raise OptionsError(_disagreement(command_flag(name), mine, saved, checkpoint.folder))
    if checkpoint.iterations >= options.iterations:
        raise OptionsError(
            f"--iterations {options.iterations}: {checkpoint.folder} has {checkpoint.iterations} behind it: "
            "use more, or leave --load out"
        )


def rank_file(rank: int) -> str:
    """The name of a process' file."""
    return f"rank_{rank:05d}.pt"


def _disagreement(flag: str, mine: object, saved: object, folder: Path) -> str:
    if isinstance(saved, bool):
        given, was = (f"{flag}: given", "without") if mine else (f"{flag}: not given", "with")
        return f"{given}, but {folder} was saved {was} it: {'leave it out' if mine else 'give it'}, or another --load"
    return f"{flag} {mine}: {folder} was saved with {flag} {saved}: use that, or another --load"


def _read(folder: Path) -> Checkpoint:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        form, iterations, options, files = (manifest[key] for key in ("format", "iteration", "options", "files"))
        damaged = [name for name, size in files.items() if (folder / name).stat().st_size != size]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise OptionsError(f"--load {folder}: the checkpoint is damaged ({error}): name another") from None
    if damaged:
        raise OptionsError(f"--load {folder}: the checkpoint is damaged ({damaged[0]} has another size): name another")
    if form != _FORMAT:
        raise OptionsError(f"--load {folder}: its format is {form}, not {_FORMAT}: use the evenpipe that saved it")
    # What older checkpoints do not say was as it is without the option.
    framework = manifest.get("framework", "megatron")
    agreed = {name: options.get(name, TrainOptions.model_fields[name].default) for name in _MUST_AGREE}
    return Checkpoint(folder, iterations, framework, agreed)


def _settle(directory: Path) -> None:
    """End replacements that a killed process has left half-done."""
    for replaced in directory.glob("iter_*.replaced"):
        final = replaced.with_suffix("")
        if final.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(final)
