"""Variables in the environment that slow a job down, keep it from starting, or hide why it stopped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import yaml

from evenpipe.doctor.finding import Finding, fine, noted, problem

__all__ = ["environment"]

_CUDA: Final = "CUDA's programming guide, environment variables"
_ALLOCATOR: Final = "torch's documentation, CUDA memory management"
_WORDS: Final = {"on": ("1", "true", "y", "yes", "on"), "off": ("0", "false", "n", "no", "off")}


class _Row(NamedTuple):
    """An entry of ``environment.yaml``, which says what its fields are."""

    name: str
    hurts: str | int | list[str]
    why: str
    source: str
    remedy: str = "unset it"
    mild: bool = False
    mild_alone: bool = False

    def is_hurt_by(self, value: str) -> bool:
        match self.hurts:
            case int(most):
                return value.isdecimal() and int(value) > most
            case "loopback":
                return value.lstrip("=").split(",") == ["lo"]
            case "any":
                return bool(value)
            case str(word):
                return value.strip().lower() in _WORDS[word]
            case values:
                return value.strip().lower() in values


@cache
def _table() -> list[_Row]:
    text = Path(__file__).with_name("environment.yaml").read_text(encoding="utf-8")
    return [_Row(**entry) for entry in yaml.safe_load(text)["variables"]]


def environment(
    environ: Mapping[str, str], several_nodes: bool, tensor_parallel: int | None = None
) -> Iterator[Finding]:
    """Findings for ``environ``; ``tensor_parallel`` None where it is not known."""
    found = [*_rows(environ, several_nodes), *_connections(environ, tensor_parallel)]
    yield from found or [fine("environment", "nothing in it that is known to hurt")]
    yield from _allocator(environ)


def _rows(environ: Mapping[str, str], several_nodes: bool) -> Iterator[Finding]:
    for row in _table():
        value = environ.get(row.name)
        if value is not None and row.is_hurt_by(value):
            said = f"{row.name}={value}: {row.why} ({row.source})"
            mild = row.mild or (row.mild_alone and not several_nodes)
            yield (noted if mild else problem)("environment", said, row.remedy)


def _connections(environ: Mapping[str, str], tensor_parallel: int | None) -> Iterator[Finding]:
    """CUDA_DEVICE_MAX_CONNECTIONS, which is right or wrong by what else runs."""
    value = environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    name = f"CUDA_DEVICE_MAX_CONNECTIONS={value}"
    if value == "1" and tensor_parallel == 1:
        yield problem(
            "environment",
            f"{name} without tensor parallelism: all work passes one queue, where a message holds up what comes behind "
            f"it, so that EvenPipe puts messages off ({_CUDA})",
            "unset it",
        )
    elif value == "1" and tensor_parallel is None:
        yield noted(
            "environment",
            f"{name}: all work passes one queue, which helps tensor parallelism only, before Blackwell ({_CUDA})",
            "keep it with tensor or context parallelism only; --tensor-parallel T tells the doctor",
        )
    elif value is not None and value.isdecimal() and 1 < int(value) <= 8 and tensor_parallel in (None, 1):
        yield noted(
            "environment",
            f"{name}: a rank has streams for compute, each link and each group, and those that share a queue hold each "
            f"other up; EvenPipe counts them at start ({_CUDA})",
            "set it to 32",
        )


def _allocator(environ: Mapping[str, str]) -> Iterator[Finding]:
    names = [name for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF") if name in environ]
    if len({environ[name] for name in names}) > 1:
        yield problem("allocator", f"{' and '.join(names)} contradict each other", "keep one of them")
    if not names:
        yield noted(
            "allocator",
            f"torch's defaults: segments do not grow, which leaves gaps between sizes ({_ALLOCATOR})",
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )
        return
    name, value = names[0], environ[names[0]]
    # A key that torch does not know stops the job itself, when it first allocates.
    given = {key.strip(): setting.strip() for key, _, setting in (part.partition(":") for part in value.split(","))}
    if given.get("backend") == "cudaMallocAsync":
        yield noted("allocator", f"{name}={value}: peaks and limits are the driver's, which EvenPipe does not see")
    elif given.get("expandable_segments", "").lower() != "true":
        yield noted("allocator", f"{name}={value}: segments do not grow", "add expandable_segments:True")
    else:
        yield fine("allocator", f"{name}={value}")
