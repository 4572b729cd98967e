"""The document docs/gpu.json, and the table in docs/gpu.md between two comments."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch

from .parts import ROOT

__all__ = ["document", "place_table", "said", "table"]

_BEGIN, _END = "<!-- what `make gpu` found -->", "<!-- end of what `make gpu` found -->"
_PLACES: Final = {
    "shared": "all stages on one GPU, messages through the host's memory",
    "nccl": "a GPU for each stage, messages over NCCL",
    "cpu": "on the CPU, which says nothing of GPUs",
}


def document(place: str, seconds: float, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`evenpipe.gpu/1`; in rows, `value` and `predicted` are in `unit`, and lists have an entry a stage."""
    found = torch.cuda.is_available()
    return {
        "format": "evenpipe.gpu/1",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": said("git", "rev-parse", "HEAD"),
        "files_changed_since": bool(said("git", "status", "--porcelain")),
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())] if found else [],
        "gpu_memory_mib": torch.cuda.get_device_properties(0).total_memory / 2**20 if found else None,
        "versions": {
            "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
            "CUDA": torch.version.cuda,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if found else None,
            "torch": torch.__version__,
            "megatron-core": _version("megatron-core"),
            "python": platform.python_version(),
        },
        "place": place,
        "seconds": round(seconds, 1),
        "parts": parts,
    }


def table(found: dict[str, Any]) -> str:
    """A document in Markdown."""
    gpus = ", ".join(f"{found['gpus'].count(name)} × {name}" for name in dict.fromkeys(found["gpus"])) or "no GPU"
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    changed = " with changes" if found["files_changed_since"] else ""
    lines = [
        f"{found['date']}, commit {found['commit']}{changed}, in {found['seconds']:.0f} s. {gpus}; {versions}. "
        f"Run {_PLACES[found['place']]}.",
        "",
        "| part | what | found | predicted |",
        "|---|---|---|---|",
    ]
    left: dict[str, list[str]] = {}
    for part in found["parts"]:
        groups: dict[tuple[str, str], list[str]] = {}
        for row in part["rows"]:
            values = f"{_text(row['value'])} {row.get('unit', '')}".strip(), _text(row.get("predicted", ""))
            groups.setdefault(values, []).append(row["what"])
        lines += [f"| {part['part']} | {'; '.join(of)} | {value} | {other} |" for (value, other), of in groups.items()]
        if part["why"]:
            lines.append(f"| {part['part']} | | {part['status']}: {part['why'].replace('|', '/')} | |")
        for one in part["unchecked"]:
            left.setdefault(f"{one['why']} ({part['part']})", []).append(one["unchecked"])
    return "\n".join([*lines, "", "Not checked:", "", *(f"- {'; '.join(of)}: {why}" for why, of in left.items())])


def place_table(page: Path, text: str) -> None:
    """Put `text` between the two comments of `page`. Raises ValueError where it has none."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"{page}: has no {_BEGIN} and {_END} to put the table between")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def _text(value: float | str | Sequence[float]) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)):
        return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
    return " ".join(map(_text, value))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def said(*command: str) -> str | None:
    """What a command prints, if there is one and it succeeds."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
