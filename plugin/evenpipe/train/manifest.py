"""The manifest of a checkpoint: which run's files it consists of, with a digest of each and one of itself."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from evenpipe.train.engines import ENGINES

__all__ = ["FORMAT", "MUST_AGREE", "FileEntry", "Manifest", "rank_file"]

FORMAT: Final = "evenpipe.checkpoint/2"

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
