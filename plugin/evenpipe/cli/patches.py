"""``evenpipe patches``: what EvenPipe replaces in Megatron and torch, and whether a Megatron is one that it knows."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenpipe.cli.parser import Commands, UsageError

if TYPE_CHECKING:
    from evenpipe.megatron.catalogue import Item
    from evenpipe.megatron.findings import Finding, Findings

__all__ = ["add_to"]


def add_to(commands: Commands) -> None:
    """Add the sub-command."""
    text = "show what EvenPipe replaces in Megatron and torch, and whether that fits what is installed"
    parser = commands.add_parser("patches", help=text, description=f"{text.capitalize()}.")
    parser.add_argument(
        "--check",
        type=Path,
        metavar="PATH",
        help="look at this checkout of Megatron-LM instead, or at the folder that megatron-core is installed in, "
        "without importing anything; exit status 0 if it is supported, 1 if not",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON document")
    form.add_argument("--markdown", action="store_true", help="print the list alone, which no installation changes")
    parser.set_defaults(run=_run)


def _run(arguments: Namespace) -> int:
    if arguments.markdown:
        if arguments.check is not None:
            raise UsageError("--markdown lists what is the same for every Megatron: leave out --check")
        print("\n".join(_markdown()))
        return 0
    findings = _look() if arguments.check is None else _examine(arguments.check)
    if arguments.json:
        print(json.dumps(_document(findings)))
    else:
        _show(findings, Console())
    return int(arguments.check is not None and not findings.supported)


def _look() -> Findings:
    from evenpipe.megatron.installed import look
    from evenpipe.upstream.imports import forget_all

    forget_all()
    return look()


def _examine(path: Path) -> Findings:
    from evenpipe.megatron.checkout import VERSION_FILE, examine

    if not path.is_dir():
        raise UsageError(f"--check {path}: there is no such folder: name a checkout of Megatron-LM")
    if not (path / VERSION_FILE).is_file():
        raise UsageError(
            f"--check {path}: has no {VERSION_FILE}: name a checkout of Megatron-LM, or the folder (site-packages) "
            "that megatron-core is installed in"
        )
    return examine(path)


def _document(findings: Findings) -> dict[str, Any]:
    from evenpipe.megatron.apex import wrong_apex
    from evenpipe.megatron.catalogue import Purpose

    return {
        "format": "evenpipe.patches/1",
        "path": None if findings.root is None else str(findings.root),
        "version": findings.version,
        "series": findings.series,
        "supported": findings.supported,
        "problems": list(findings.problems(Purpose.TRAINING)),
        "cpu_mode_problems": list(findings.problems(Purpose.CPU_MODE)),
        "wrong_apex": wrong_apex(),
        "symbols": [
            {
                "needed_for": item.purpose.value,
                "set": item.owner,
                "patch": item.name if item.is_replaced else None,
                "symbols": list(item.symbols),
                "series": list(item.versions),
                "state": state.value,
                "detail": detail,
                "reason": item.reason,
            }
            for item, state, detail in findings.findings
        ],
    }


def _show(findings: Findings, console: Console) -> None:
    from evenpipe.megatron.apex import wrong_apex
    from evenpipe.megatron.catalogue import Purpose

    def say(line: str, style: str = "") -> None:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    version = f"megatron-core {findings.version}" if findings.version else "megatron-core"
    verdict = "supported" if findings.supported else "not supported"
    say(f"{version}{f' in {findings.root}' if findings.root else ''}: {verdict}", "bold")
    for heading, rows in _sections(findings.findings):
        say(f"\n{heading}", "bold")
        console.print(_table(rows))
    said: set[str] = set()
    for purpose in Purpose:
        for line in findings.problems(purpose):
            if line not in said:
                say(f"\n{'' if purpose is Purpose.TRAINING else f'{purpose.value}: '}{line}")
                said.add(line)
    for remark in (_absence(findings), wrong_apex()):
        if remark is not None:
            say(f"\n{remark}")


def _absence(findings: Findings) -> str | None:
    from evenpipe.megatron.findings import TRAINING_PACKAGE, State

    if not any(finding.state is State.ABSENT for finding in findings.findings):
        return None
    return (
        f"absent: {TRAINING_PACKAGE}, which only scripts of Megatron-LM need (a checkout has it, and megatron-core "
        "from 0.17 on)"
    )


def _sections(findings: Sequence[Finding]) -> Iterator[tuple[str, list[Finding]]]:
    from evenpipe.megatron.catalogue import Purpose

    for purpose in Purpose:
        rows = [finding for finding in findings if finding.item.purpose is purpose]
        for done, replaced in (("replaced", True), ("called", False)):
            if some := [finding for finding in rows if finding.item.is_replaced is replaced]:
                yield f"{done} for {purpose.value}", some


def _table(findings: Sequence[Finding]) -> Table:
    table = Table.grid(padding=(0, 2), pad_edge=True)
    for item, state, _ in findings:
        symbols = Text("\n".join(item.symbols), overflow="fold")
        symbols.append(f" ({_releases(item.versions)})")
        if item.reason is not None:
            symbols.append(f"\n{item.reason}", style="dim")
        table.add_row(Text(state.value), Text(_set_of(item)), symbols)
    return table


def _markdown() -> Iterator[str]:
    from evenpipe.megatron.catalogue import catalogue

    replaced, called = ([item for item in catalogue() if item.is_replaced is wanted] for wanted in (True, False))
    yield from ("# What EvenPipe replaces at run time", "", "Printed by `evenpipe patches --markdown`.", "")
    yield from _rows("needed for", "set", "symbol", "releases", "why it is replaced")
    for item in replaced:
        yield from _rows(*_cells(item), item.reason or "", head=False)
    yield from ("", "## What it calls", "", "These, too, have to have the recorded signatures.", "")
    yield from _rows("needed for", "set", "symbol", "releases")
    for item in called:
        yield from _rows(*_cells(item), head=False)


def _cells(item: Item) -> tuple[str, ...]:
    symbols = "<br>".join(f"`{symbol}`" for symbol in item.symbols)
    return (item.purpose.value, _set_of(item), symbols, _releases(item.versions))


def _rows(*cells: str, head: bool = True) -> Iterator[str]:
    yield f"| {' | '.join(cells)} |"
    if head:
        yield f"|{'---|' * len(cells)}"


def _set_of(item: Item) -> str:
    """Without the module that a set of CPU mode waits for."""
    return item.owner.partition(" ")[0]


def _releases(versions: Mapping[str, str]) -> str:
    from evenpipe.megatron.supported import RELEASES
    from evenpipe.upstream import ANY

    known, named = list(RELEASES), list(versions)
    if named == [ANY]:
        return "any"
    first = known.index(named[0])
    if named != known[first : first + len(named)]:
        return ", ".join(named)
    return named[0] if len(named) == 1 else f"{named[0]} to {named[-1]}"
