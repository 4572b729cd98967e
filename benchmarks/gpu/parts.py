"""How a part is carried out: its ranks are processes of their own, with a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from .rank import ENDED, UNDER_WAY
from .registry import ROOT, Part, lacking

__all__ = ["carry_out", "not_reached"]

_START_SECONDS: Final = 40  # for imports, a device's context and links, before anything can hang
_CPU_PATIENCE: Final = 5  # what a GPU does at once may take a busy processor long


def carry_out(part: Part, place: str, ranks: int, limit: float, show: Callable[[str], None]) -> dict[str, Any]:
    """The part's entry of the document. `show` is told each row that is new, and of a failure the last lines.

    Waits for the ranks for `limit` seconds at most, or as long as the part may take, and leaves none behind.
    """
    if (why_not := lacking(part, place)) is not None:
        return _entry(part, "skipped", why_not)
    if limit < 1:
        return _entry(part, "skipped", "no time was left")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="evenpipe-gpu-") as name:
        folder = Path(name)
        ranks = 1 if part.alone else ranks
        statuses, written = _run(part, place, ranks, limit, folder, show)
        rows = _rows(written, ranks)
        # What takes long before the first action is no hang.
        in_an_action = UNDER_WAY in [row["value"] for row in rows]
        status, word, why = "measured", "not ended", None
        if any(statuses):
            failed = next(rank for rank, ended in enumerate(statuses) if ended)
            lines = (folder / f"rank-{failed}.log").read_text(errors="replace").strip().splitlines() or ["no word"]
            show("\n".join(lines[-15:]))
            why = f"rank {failed} ended with {statuses[failed]}: {lines[-1].strip()}"
            status, word = "failed", "failed"
        elif None in statuses and part.may_hang and in_an_action and time.monotonic() - began < limit:
            word = f"HUNG: nothing for {part.seconds:.0f} s"
        elif None in statuses:
            why = f"not done after {time.monotonic() - began:.0f} s"
            status, word = "failed", "not done"
        elif part.must_hang:
            why = "it ended, but had to hang: that others ended proves nothing"
            status, rows = "failed", [{**row, "value": "ENDED"} for row in rows]
    for row in rows:
        row["value"] = word if row["value"] == UNDER_WAY else row["value"]
    unchecked = [row for row in written if "unchecked" in row]
    come_to = {row["what"] for row in rows} | {row["unchecked"] for row in unchecked}
    missed = [case for row in written for case in row.get("expected", ()) if case not in come_to]
    reason = f"not reached: {why or 'one before it hung'}"
    unchecked += [{"unchecked": case, "why": reason} for case in missed]
    return _entry(part, status, why, time.monotonic() - began, rows, unchecked)


def not_reached(part: Part) -> dict[str, Any]:
    """The part's entry of the document as long as it has not been carried out."""
    return _entry(part, "skipped", "the run ended before it")


def _entry(
    part: Part,
    status: str,
    why: str | None,
    seconds: float = 0.0,
    rows: Sequence[dict[str, Any]] = (),
    unchecked: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    unchecked = [*unchecked, *([{"unchecked": part.checks, "why": why}] if status == "skipped" else [])]
    found = {"status": status, "why": why, "seconds": round(seconds, 1), "rows": rows, "unchecked": unchecked}
    return {"part": part.name, "environment": dict(part.environment), **found}


def _run(
    part: Part, place: str, ranks: int, limit: float, folder: Path, show: Callable[[str], None]
) -> tuple[list[int | None], list[dict[str, Any]]]:
    """How each rank ended (None: it did not), and what they wrote."""
    end, told, processes = time.monotonic() + limit, set[str](), list[subprocess.Popen[bytes]]()
    own_seconds = part.seconds * (_CPU_PATIENCE if place == "cpu" and not part.may_hang else 1)
    try:
        own_end = time.monotonic() + own_seconds + (_START_SECONDS if part.may_hang else 0)
        processes += [_start(part, place, rank, ranks, folder) for rank in range(ranks)]
        while True:
            statuses, written = [process.poll() for process in processes], _written(folder)
            for line in map(_told, [*_rows(written, ranks), *(row for row in written if "unchecked" in row)]):
                if line not in told:
                    told.add(line)
                    show(line)
                    own_end = time.monotonic() + own_seconds if part.may_hang else own_end
            if any(statuses) or None not in statuses or time.monotonic() > min(end, own_end):
                return statuses, written
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _start(part: Part, place: str, rank: int, count: int, folder: Path) -> subprocess.Popen[bytes]:
    environment = dict(part.environment)
    if place == "cpu":
        environment.pop("TORCH_CUDA_SANITIZER", None)
    elif place == "nccl-shared":
        # Not more thread blocks than all ranks' groups have room for (NCCL 2.30, environment variables).
        environment = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", **environment}
    words = (part.module, part.argument, place, str(rank), str(count), str(folder))
    path = os.pathsep.join([str(ROOT), str(ROOT / "plugin"), os.environ.get("PYTHONPATH", "")])
    with open(folder / f"rank-{rank}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.rank", *words],
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _written(folder: Path) -> list[dict[str, Any]]:
    """All whole lines that the ranks have written; of a row also the file that it is from."""
    texts = [(path.name, path.read_text(encoding="utf-8")) for path in sorted(folder.glob("rows-*.jsonl"))]
    lines = [(name, line) for name, text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [{**row, "from": name} if "what" in row else row for name, line in lines for row in [json.loads(line)]]


def _rows(written: Sequence[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """What is said last of each case: that it is under way, as long as it is on any rank, or not all have ended it."""
    of_cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in written:
        if "what" in row:
            of_cases.setdefault(row["what"], {})[row["from"]] = {key: row[key] for key in row if key != "from"}
    for of_ranks in of_cases.values():
        values = [row["value"] for row in of_ranks.values()]
        if UNDER_WAY in values or 0 < values.count(ENDED) < ranks:
            next(iter(of_ranks.values()))["value"] = UNDER_WAY
    return [next(iter(of_ranks.values())) for of_ranks in of_cases.values()]


def _told(row: dict[str, Any]) -> str:
    if "unchecked" in row:
        return f"{row['unchecked']}: not checked: {row['why']}"
    return f"{row['what']}: {row['value']} {row.get('unit', '')}"
