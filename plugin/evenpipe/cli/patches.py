"""``evenpipe patches``: what EvenPipe replaces in other packages, and whether these are ones that it knows."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from evenpipe.cli.parser import Commands, UsageError, add_command
from evenpipe.cli.progress import progress
from evenpipe.cli.shown import console_of, print_prose
from evenpipe.upstream import ANY
from evenpipe.upstream.findings import Finding, Findings, Item, Purpose, State
from evenpipe.upstream.installed import wrong_apex

__all__ = ["add_to", "markdown", "show"]


def show(megatron: Findings | None, deepspeed: Findings | None, console: Console, installed: bool) -> None:
    """Both frameworks as far as they were found; where they were looked for among what is `installed`, says so."""
    if megatron is not None:
        _show_one("megatron-core", megatron, console)
        for remark in (_absence(megatron), wrong_apex()):
            if remark is not None:
                print_prose(console, f"\n{remark}")
    if None not in (megatron, deepspeed) or installed:
        print_prose(console, "")
    if deepspeed is not None:
        _show_one("deepspeed", deepspeed, console)
    elif installed:
        print_prose(console, "deepspeed: not installed here", "bold")


def _show_one(name: str, findings: Findings, console: Console) -> None:
    version = f"{name} {findings.version}" if findings.version else name
    verdict = "supported" if findings.supported else "not supported"
    print_prose(console, f"{version}{f' in {findings.root}' if findings.root else ''}: {verdict}", "bold")
    for heading, rows in _sections(findings.findings):
        print_prose(console, f"\n{heading}", "bold")
        _print_items(console, rows)
    said: set[str] = set()
    for purpose in Purpose:
        for line in findings.problems(purpose):
            if line not in said:
                print_prose(console, f"\n{'' if purpose is Purpose.TRAINING else f'{purpose.value}: '}{line}")
                said.add(line)


def _absence(findings: Findings) -> str | None:
    from evenpipe.megatron_lm.catalogue import TRAINING_PACKAGE

    if not any(finding.state is State.ABSENT for finding in findings.findings):
        return None
    return (
        f"absent: {TRAINING_PACKAGE}, which only scripts of Megatron-LM need (a checkout has it, and megatron-core "
        "from 0.17 on)"
    )


def _sections(findings: Sequence[Finding]) -> Iterator[tuple[str, list[Finding]]]:
    for purpose in Purpose:
        rows = [finding for finding in findings if finding.item.purpose is purpose]
        for done, replaced in (("replaced", True), ("called", False)):
            if some := [finding for finding in rows if finding.item.is_replaced is replaced]:
                yield f"{done} for {purpose.value}", some


def _print_items(console: Console, findings: Sequence[Finding]) -> None:
    """Print state, set and symbols of each; symbols are never broken, and go below where a line is too short."""
    states, sets = (
        max(map(len, column))
        for column in zip(*((state.value, _set_of(item)) for item, state, _ in findings), strict=True)
    )
    for item, state, _ in findings:
        head = f"  {state.value:<{states}}  {_set_of(item):<{sets}}  "
        *others, last = item.symbols
        symbols = [*others, f"{last} ({_releases(item)})"]
        below = len(head) + max(map(len, symbols)) > console.width
        indent = " " * (6 if below else len(head))
        lines = [f"{indent}{symbol}" for symbol in symbols]
        print_prose(console, "\n".join([head.rstrip(), *lines] if below else [head + symbols[0], *lines[1:]]))
        if item.reason is not None:
            print_prose(console, f"{indent}{item.reason}", "dim")


def markdown() -> Iterator[str]:
    """The lines of the list, which no installation changes."""
    from evenpipe.deepspeed.catalogue import catalogue as of_deepspeed
    from evenpipe.megatron_lm.catalogue import catalogue as of_megatron

    items = (*of_megatron(), *of_deepspeed())
    replaced, called = ([item for item in items if item.is_replaced is wanted] for wanted in (True, False))
    yield from ("# What EvenPipe replaces at run time", "", "Printed by `evenpipe patches --markdown`.", "")
    yield from ("Attributes that objects get when they are made are set on single ones, such as a run's optimizer.", "")
    yield from _rows("needed for", "set", "symbol", "releases", "why it is replaced")
    for item in replaced:
        yield from _rows(*_cells(item), item.reason or "", head=False)
    yield from ("", "## What it calls", "", "These, too, have to have the recorded signatures.", "")
    yield from _rows("needed for", "set", "symbol", "releases")
    for item in called:
        yield from _rows(*_cells(item), head=False)


def _cells(item: Item) -> tuple[str, ...]:
    symbols = "<br>".join(f"`{symbol}`" for symbol in item.symbols)
    return (item.purpose.value, _set_of(item), symbols, _releases(item))


def _rows(*cells: str, head: bool = True) -> Iterator[str]:
    yield f"| {' | '.join(cells)} |"
    if head:
        yield f"|{'---|' * len(cells)}"


def _set_of(item: Item) -> str:
    """Without the module that a set of CPU mode waits for."""
    return item.owner.partition(" ")[0]


def _releases(item: Item) -> str:
    from evenpipe.deepspeed.supported import DEEPSPEED
    from evenpipe.deepspeed.supported import RELEASES as OF_DEEPSPEED
    from evenpipe.megatron.supported import RELEASES as OF_MEGATRON

    known = list(OF_DEEPSPEED if item.distribution == DEEPSPEED else OF_MEGATRON)
    named = list(item.versions)
    if named == [ANY]:
        return "any"
    first = known.index(named[0])
    if named != known[first : first + len(named)]:
        return ", ".join(named)
    return named[0] if len(named) == 1 else f"{named[0]} to {named[-1]}"


class _Found(NamedTuple):
    """The findings of each framework; None where there is none."""

    megatron: Findings | None
    deepspeed: Findings | None


def add_to(commands: Commands) -> None:
    """Add the sub-command."""
    parser = add_command(commands, "patches")
    parser.add_argument(
        "--check",
        type=Path,
        metavar="PATH",
        help="look at this checkout of Megatron-LM or DeepSpeed instead, or at the folder that megatron-core or "
        "deepspeed is installed in, without importing anything; exit status 0 if what is there is supported, 1 if not",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON document")
    form.add_argument("--markdown", action="store_true", help="print the list alone, which no installation changes")
    parser.set_defaults(run=_run)


def _run(arguments: Namespace) -> int:
    if arguments.markdown:
        if arguments.check is not None:
            raise UsageError("--markdown lists what is the same for every release: leave out --check")
        print("\n".join(markdown()))
        return 0
    with progress("patches", "imports frameworks" if arguments.check is None else "reads files"):
        found = _found(arguments.check)
    if arguments.json:
        print(json.dumps(_document(found)))
    else:
        show(found.megatron, found.deepspeed, console_of(), installed=arguments.check is None)
    return int(arguments.check is not None and not all(part.supported for part in found if part is not None))


def _found(path: Path | None) -> _Found:
    """In the folder `path`, or what this interpreter imports."""
    from evenpipe.deepspeed import catalogue as deepspeed
    from evenpipe.megatron_lm import catalogue as megatron

    if path is None:
        return _Found(megatron.look(), deepspeed.look())
    if not path.is_dir():
        raise UsageError(f"--check {path}: there is no such folder: name a checkout of Megatron-LM or DeepSpeed")
    found = _Found(
        megatron.examine(path) if (path / megatron.VERSION_FILE).is_file() else None,
        deepspeed.examine(path) if (path / deepspeed.MAIN_FILE).is_file() else None,
    )
    if found == (None, None):
        raise UsageError(
            f"--check {path}: has neither {megatron.VERSION_FILE} nor {deepspeed.MAIN_FILE}: name a checkout of "
            "Megatron-LM or DeepSpeed, or the folder (site-packages) that megatron-core or deepspeed is installed in"
        )
    return found


def _document(found: _Found) -> dict[str, Any]:
    """Megatron's part, if there is one, has its keys at the top; DeepSpeed's is under its name, null without one."""
    document: dict[str, Any] = {"format": "evenpipe.patches/1"}
    if found.megatron is not None:
        document |= _part(found.megatron)
        document |= {"cpu_mode_problems": list(found.megatron.problems(Purpose.CPU_MODE)), "wrong_apex": wrong_apex()}
    return document | {"deepspeed": None if found.deepspeed is None else _part(found.deepspeed)}


def _part(findings: Findings) -> dict[str, Any]:
    return {
        "path": None if findings.root is None else str(findings.root),
        "version": findings.version,
        "series": findings.series,
        "supported": findings.supported,
        "problems": list(findings.problems()),
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
