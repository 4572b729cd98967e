"""The document docs/gpu.json, and the table in docs/gpu.md between two comments."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch

from evenpipe.report.files import check_writable, write_atomically

from .registry import ROOT, nccl_version

__all__ = ["document", "said", "table", "unchecked", "why_not_writable", "write"]

_BEGIN, _END = "<!-- what `make gpu` found -->", "<!-- end of what `make gpu` found -->"
#: Both files are smaller by far; logs and data of parts are in the folder for temporary files.
_ROOM, _ROOM_FOR_LOGS = 1 << 20, 1 << 28
_PLACES: Final = {
    "shared": "all stages on one GPU, messages through the host's memory",
    "nccl-shared": "all stages on one GPU, messages over NCCL",
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
            "NCCL": ".".join(map(str, nccl_version())) if found else None,
            "torch": torch.__version__,
            **{name: _version(name) for name in ("megatron-core", "deepspeed", "transformer-engine")},
            "python": platform.python_version(),
        },
        "place": place,
        "seconds": round(seconds, 1),
        "parts": parts,
        "unchecked": unchecked(parts),
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
    ended: dict[str, list[str]] = {}  # parts that found nothing, by why
    for part in found["parts"]:
        groups: dict[tuple[str, str], list[str]] = {}
        for row in part["rows"]:
            values = f"{_text(row['value'])} {row.get('unit', '')}".strip(), _text(row.get("predicted", ""))
            groups.setdefault(values, []).append(row["what"])
        lines += [f"| {part['part']} | {'; '.join(of)} | {value} | {other} |" for (value, other), of in groups.items()]
        why = f"{part['status']}: {part['why'].replace('|', '/')}" if part["why"] else ""
        if why and part["rows"]:
            lines.append(f"| {part['part']} | | {why} | |")
        elif why:
            ended.setdefault(why, []).append(part["part"])
    lines += [f"| {'; '.join(of)} | | {why} | |" for why, of in ended.items()]
    left = unchecked([part for part in found["parts"] if part["rows"]])
    return "\n".join([*lines, "", "Not checked:", "", *(f"- {line}" for line in left)])


def unchecked(parts: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each reason why something was not checked: what, the reason, and the part that checks it."""
    left: dict[str, list[str]] = {}
    for part in parts:
        for one in part["unchecked"]:
            left.setdefault(f"{one['why']} ({part['part']})", []).append(one["unchecked"])
    return [f"{'; '.join(of)}: {why}" for why, of in left.items()]


def why_not_writable(folder: Path) -> str | None:
    """Why the results could not be written into `folder`, and what to do, in one line; None if they can be."""
    for path in (folder / "gpu.json", folder / "gpu.md"):
        if (said := check_writable(path)) is not None:
            return f"{path} {said}"
    try:
        _placed(folder / "gpu.md", "")
        with tempfile.TemporaryFile(dir=folder) as probe:
            os.posix_fallocate(probe.fileno(), 0, _ROOM)
        at = tempfile.gettempdir()
        if shutil.disk_usage(at).free < _ROOM_FOR_LOGS:
            return f"{at}, for temporary files, has less than 256 MiB left: free some, or name another by TMPDIR"
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"{folder}: there is no room for a MiB ({error.strerror}): free some, or name another by --into"
    return None


def write(folder: Path, found: dict[str, Any]) -> None:
    """Put a document into `folder`, and its table into the page that is there."""
    write_atomically(folder / "gpu.json", json.dumps(found, indent=1) + "\n")
    write_atomically(folder / "gpu.md", _placed(folder / "gpu.md", table(found)))


def _placed(page: Path, text: str) -> str:
    """`page`, if there is one, with `text` between its two comments. Raises ValueError where it has none."""
    old = page.read_text(encoding="utf-8") if page.exists() else f"# On GPUs\n\n{_BEGIN}{_END}\n"
    before, begin, rest = old.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"{page}: has no {_BEGIN} and {_END} to put the table between")
    return f"{before}{begin}\n{text}\n{end}{after}"


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
