"""What ``evenpipe patches`` shows to people: on a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenpipe.upstream import ANY
from evenpipe.upstream.findings import Finding, Findings, Item, Purpose, State
from evenpipe.upstream.installed import wrong_apex

__all__ = ["markdown", "show"]


def show(megatron: Findings | None, deepspeed: Findings | None, console: Console, installed: bool) -> None:
    """Both frameworks as far as they were found; where they were looked for among what is `installed`, says so."""
    if megatron is not None:
        _show_one("megatron-core", megatron, console)
        for remark in (_absence(megatron), wrong_apex()):
            if remark is not None:
                _say(console, f"\n{remark}")
    if None not in (megatron, deepspeed) or installed:
        _say(console, "")
    if deepspeed is not None:
        _show_one("deepspeed", deepspeed, console)
    elif installed:
        _say(console, "deepspeed: not installed here", "bold")


def _show_one(name: str, findings: Findings, console: Console) -> None:
    version = f"{name} {findings.version}" if findings.version else name
    verdict = "supported" if findings.supported else "not supported"
    _say(console, f"{version}{f' in {findings.root}' if findings.root else ''}: {verdict}", "bold")
    for heading, rows in _sections(findings.findings):
        _say(console, f"\n{heading}", "bold")
        console.print(_table(rows))
    said: set[str] = set()
    for purpose in Purpose:
        for line in findings.problems(purpose):
            if line not in said:
                _say(console, f"\n{'' if purpose is Purpose.TRAINING else f'{purpose.value}: '}{line}")
                said.add(line)


def _say(console: Console, line: str, style: str = "") -> None:
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _absence(findings: Findings) -> str | None:
    from evenpipe.megatron.catalogue import TRAINING_PACKAGE

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


def _table(findings: Sequence[Finding]) -> Table:
    table = Table.grid(padding=(0, 2), pad_edge=True)
    for item, state, _ in findings:
        symbols = Text("\n".join(item.symbols), overflow="fold")
        symbols.append(f" ({_releases(item)})")
        if item.reason is not None:
            symbols.append(f"\n{item.reason}", style="dim")
        table.add_row(Text(state.value), Text(_set_of(item)), symbols)
    return table


def markdown() -> Iterator[str]:
    """The lines of the list, which no installation changes."""
    from evenpipe.deepspeed.catalogue import catalogue as of_deepspeed
    from evenpipe.megatron.catalogue import catalogue as of_megatron

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
