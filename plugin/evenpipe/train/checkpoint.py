"""Checkpoints on disk: a folder each, complete from the moment it has its name, and a file that names the latest.

DIR/latest                           iter_0000010 and the digest of its manifest
DIR/owner.json                       locked by the run that saves there, with its name
DIR/iter_0000010/checkpoint.json     the `Manifest`
DIR/iter_0000010/rank_00000.pt       what one process needs to go on; names run, iteration and rank, too
DIR/iter_0000015.1f00c3d2.partial/   being written or removed, or left by a process that was killed: never loaded
DIR/iter_0000010.replaced/           makes room for another of its name, and comes back if that never arrives
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from evenpipe.report.files import check_writable, move_durably, write_durably
from evenpipe.settings.spelling import command_flag
from evenpipe.train.engines import ENGINES
from evenpipe.train.options import OptionsError, TrainOptions
from evenpipe.train.ownership import Disturbed
from evenpipe.wording.validation import plain_message

__all__ = [
    "FORMAT",
    "MUST_AGREE",
    "Checkpoint",
    "Draft",
    "FileEntry",
    "Manifest",
    "check",
    "damaged",
    "find",
    "rank_file",
    "refuse_misfit",
]

FORMAT: Final = "evenpipe.checkpoint/2"

_LATEST: Final = "latest"
_MANIFEST: Final = "checkpoint.json"
_NAME: Final = re.compile(r"iter_\d{7,12}")
_POINTER: Final = re.compile(rf"({_NAME.pattern}) ([0-9a-f]{{64}})\n?")
#: More than any manifest or pointer has.
_MOST_BYTES: Final = 2**24
_BLOCK_BYTES: Final = 2**20


_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Options = dict[str, bool | int | float | str]
#: Options that decide which parameters and optimizer state there are, and which process has them.
MUST_AGREE: Final = (
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
#: Their product is the number of processes, each of which has a file.
_SIZES: Final = ("stages", "data_parallel", "tensor_parallel")


def rank_file(rank: int) -> str:
    """Return the name of a process' file."""
    return f"rank_{rank:05d}.pt"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Frozen):
    """The size of a file, and the SHA-256 of its bytes."""

    bytes: int = Field(ge=0)
    sha256: _Digest


class Manifest(_Frozen):
    """`checkpoint.json`. `digest` is the SHA-256 of all other fields, so that no byte of it can change unnoticed."""

    format: Literal["evenpipe.checkpoint/2"]
    iteration: int = Field(ge=1)
    framework: str
    options: _Options
    run: str = Field(pattern=r"^[0-9a-f]{32}$")
    files: dict[str, FileEntry]
    digest: _Digest

    @classmethod
    def of(cls, **fields: Any) -> Manifest:
        """Return the manifest with these fields, sealed. Raises ValueError where they do not fit together."""
        unsealed = cls.model_construct(format=FORMAT, **fields)
        return cls(format=FORMAT, **fields, digest=unsealed._seal())

    @model_validator(mode="after")
    def _is_whole(self) -> Manifest:
        if self.digest != self._seal():
            raise ValueError("its digest is another")
        if self.framework not in {engine.framework for engine in ENGINES.values()}:
            raise ValueError(f"framework: {self.framework!r} is unknown")
        if self.options.keys() != set(MUST_AGREE):
            raise ValueError("options: they are those of another version of EvenPipe")
        self._check_files()
        return self

    def _check_files(self) -> None:
        """Raise ValueError unless there is one file for each process of the run."""
        processes = 1
        for name in _SIZES:
            size = self.options[name]
            if type(size) is not int or size < 1:
                raise ValueError(f"options: {name} is no number of processes")
            processes *= size
        if len(self.files) != processes or any(rank_file(rank) not in self.files for rank in range(processes)):
            raise ValueError(f"files: expected {rank_file(0)} to {rank_file(processes - 1)} and no other")

    def _seal(self) -> str:
        fields = self.model_dump(mode="json", exclude={"digest"})
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


class Checkpoint(NamedTuple):
    """A complete checkpoint."""

    folder: Path
    manifest: Manifest

    @property
    def iterations(self) -> int:
        """How many it has behind it."""
        return self.manifest.iteration

    @contextmanager
    def opened(self, name: str) -> Iterator[BinaryIO]:
        """Give a file of it, open at its start, once all its bytes are known to be those that were saved.

        Raises OptionsError where they are not.
        """
        path, entry = self.folder / name, self.manifest.files[name]
        try:
            file = path.open("rb")
        except OSError as error:
            raise damaged(path, error.strerror or str(error)) from None
        with file:
            found = hashlib.sha256()
            try:
                while block := file.read(_BLOCK_BYTES):
                    found.update(block)
                size = file.tell()
                file.seek(0)
            except OSError as error:
                raise damaged(path, error.strerror or str(error)) from None
            if size != entry.bytes:
                raise damaged(path, f"it has {size} bytes and not {entry.bytes}")
            if found.hexdigest() != entry.sha256:
                raise damaged(path, "its bytes are not those that were saved")
            yield file


class Draft:
    """The checkpoint after `iterations` iterations, while `run`, which owns `directory`, writes it.

    One process calls `begin`, which gives the folder that all then `write` to, and `complete` after that; `discard`
    takes the place of `complete` when one of them failed. All raise OSError; Disturbed if another run interferes.
    """

    def __init__(self, directory: Path, iterations: int, run: str) -> None:
        self.final = directory / f"iter_{iterations:07d}"
        self.partial = _aside(self.final)
        self._directory = directory
        self._iterations = iterations
        self._run = run

    def begin(self) -> Path:
        """Make an empty draft with a name of its own, and remove what dead runs have left half-written."""
        for left_over in self._directory.glob("iter_*.partial"):
            shutil.rmtree(left_over)
        _settle(self._directory)
        self.partial.mkdir()
        return self.partial

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        """Write a file of the checkpoint, safely on disk when this returns; its folder must be there."""
        if not self.partial.is_dir():
            raise Disturbed(f"{self.partial}: another run has removed it: end one of them, or save elsewhere")
        write_durably(self.partial / name, fill)

    def discard(self) -> None:
        """Remove it, as if it had never been begun."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def complete(self, options: TrainOptions, files: Mapping[str, FileEntry]) -> None:
        """Make the draft a checkpoint, and then the latest, if it consists of exactly these files.

        Of those before it, the newest remain that --keep asks for.
        """
        manifest = Manifest.of(
            run=self._run,
            iteration=self._iterations,
            framework=ENGINES[options.engine].framework,
            options={name: getattr(options, name) for name in MUST_AGREE},
            files=dict(files),
        )
        sizes = {path.name: path.stat().st_size for path in self.partial.iterdir()}
        if sizes != {name: entry.bytes for name, entry in files.items()}:
            raise Disturbed(f"{self.partial}: it has other files than this run wrote: save elsewhere")
        self.write(_MANIFEST, lambda file: file.write(manifest.model_dump_json(indent=1).encode()))
        if self.final.exists():
            self.final.rename(_replaced(self.final))
        move_durably(self.partial, self.final)
        pointer = f"{self.final.name} {manifest.digest}\n"
        write_durably(self._directory / _LATEST, lambda file: file.write(pointer.encode()))
        _remove(_replaced(self.final))
        if options.keep:
            _keep(self._directory, options.keep, self.final)


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
    """Return the latest checkpoint in `directory`, or the one that `directory` itself is.

    Its manifest is verified, its files are when they are `opened`. Raises OptionsError, of --load, where there is none,
    or where it is damaged or of another format.
    """
    if (directory / _MANIFEST).is_file():
        return _read(directory)
    path = directory / _LATEST
    try:
        named = _POINTER.fullmatch(_bytes_of(path).decode("ascii", "replace"))
    except OSError as error:
        raise OptionsError(
            f"--load {directory}: no checkpoint there ({_LATEST}: {error.strerror or error}): "
            "name a folder that --save has written to, or leave --load out"
        ) from None
    if named is None:
        raise damaged(path, "it names no checkpoint", "name one of the folders beside it")
    folder, digest = directory / named[1], named[2]
    problems = []
    for place in (folder, _replaced(folder)):
        try:
            checkpoint = _read(place)
        except OptionsError as error:
            problems.append(error)
            continue
        if checkpoint.manifest.digest == digest:
            return checkpoint
        problems.append(damaged(path, f"{folder.name} is not the checkpoint that it names", f"name {folder} itself"))
    raise problems[0]


def refuse_misfit(options: TrainOptions, checkpoint: Checkpoint) -> None:
    """Raise OptionsError, naming flag and values, where a run with `options` cannot go on from `checkpoint`."""
    if checkpoint.manifest.framework != ENGINES[options.engine].framework:
        engine = next(name for name, package in ENGINES.items() if package.framework == checkpoint.manifest.framework)
        raise OptionsError(
            f"--engine {options.engine}: {checkpoint.folder} was saved with --engine {engine}: "
            "use that, or another --load"
        )
    for name, saved in checkpoint.manifest.options.items():
        mine = getattr(options, name)
        if mine != saved:
            raise OptionsError(_disagreement(command_flag(name), mine, saved, checkpoint.folder))
    if checkpoint.iterations >= options.iterations:
        raise OptionsError(
            f"--iterations {options.iterations}: {checkpoint.folder} has {checkpoint.iterations} behind it: "
            "use more, or leave --load out"
        )


def damaged(path: Path, reason: str, remedy: str = "name another") -> OptionsError:
    """Return the error of --load for a file or a folder that cannot be used."""
    return OptionsError(f"--load {path}: the checkpoint is damaged ({reason}): {remedy}")


def _disagreement(flag: str, mine: object, saved: object, folder: Path) -> str:
    if isinstance(saved, bool):
        given, was = (f"{flag}: given", "without") if mine else (f"{flag}: not given", "with")
        return f"{given}, but {folder} was saved {was} it: {'leave it out' if mine else 'give it'}, or another --load"
    return f"{flag} {mine}: {folder} was saved with {flag} {saved}: use that, or another --load"


def _read(folder: Path) -> Checkpoint:
    try:
        content = _bytes_of(folder / _MANIFEST)
        sizes = {path.name: path.stat().st_size for path in folder.glob("rank_*.pt")}
    except OSError as error:
        raise damaged(folder, f"{_MANIFEST}: {error.strerror or error}") from None
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        if first["loc"] == ("format",) and isinstance(first["input"], str):
            raise OptionsError(
                f"--load {folder}: it is of the format {first['input']!r}, which this version of EvenPipe does not "
                "know: name another"
            ) from None
        where = ".".join(map(str, (_MANIFEST, *first["loc"])))
        raise damaged(folder, f"{where}: {plain_message(first)}") from None
    for name, entry in manifest.files.items():
        if sizes.get(name) != entry.bytes:
            raise damaged(folder, f"{name} {'has another size' if name in sizes else 'is not there'}")
    return Checkpoint(folder, manifest)


def _bytes_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MOST_BYTES)


def _replaced(final: Path) -> Path:
    return final.with_name(f"{final.name}.replaced")


def _aside(folder: Path) -> Path:
    """Return a name beside it that is never loaded, and that no other run uses."""
    return folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.partial")


def _remove(folder: Path) -> None:
    """First the name, so that no half of it is taken for a checkpoint."""
    if folder.exists():
        aside = _aside(folder)
        folder.rename(aside)
        shutil.rmtree(aside)


def _settle(directory: Path) -> None:
    """End replacements that a killed process has left half-done, on the side that is the latest."""
    for replaced in directory.glob("iter_*.replaced"):
        final = replaced.with_suffix("")
        if final.exists():
            try:
                latest = find(directory).folder
            except OptionsError:
                latest = final
            if latest != replaced:
                _remove(replaced)
                continue
            _remove(final)
        replaced.rename(final)


def _keep(directory: Path, count: int, latest: Path) -> None:
    """Remove all checkpoints but the latest and those that were completed last, `count` altogether."""
    every = [path for path in directory.glob("iter_*") if _NAME.fullmatch(path.name) and (path / _MANIFEST).is_file()]
    others = sorted((path for path in every if path != latest), key=lambda path: (path / _MANIFEST).stat().st_mtime_ns)
    for old in others[: max(len(others) - (count - 1), 0)]:
        _remove(old)
