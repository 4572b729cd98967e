"""What ``evenpipe doctor`` shows: one table for people, one document for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenpipe.doctor.finding import Finding, Verdict

__all__ = ["Said", "document", "gathered", "show"]

_STYLES: Final = {
    Verdict.FINE: "green",
    Verdict.NOTE: "yellow",
    Verdict.PROBLEM: "bold red",
    Verdict.UNSEEN: "dim",
}
_WIDTH_OF_A_LOG: Final = 160


class Said(NamedTuple):
    """A finding, and the ranks that have it."""

    finding: Finding
    ranks: tuple[int, ...]


def gathered(by_rank: Mapping[int, Sequence[Finding]]) -> list[Said]:
    """What several ranks found alike is one entry; checks stay together, in the order in which they first appear."""
    ranks: dict[Finding, list[int]] = {}
    for rank, findings in sorted(by_rank.items()):
        for finding in findings:
            if rank not in ranks.setdefault(finding, []):
                ranks[finding].append(rank)
    checks = list(dict.fromkeys(finding.check for finding in ranks))
    return sorted(
        (Said(finding, tuple(those)) for finding, those in ranks.items()),
        key=lambda said: checks.index(said.finding.check),
    )


def document(
    said: Sequence[Said], pairs: Sequence[Mapping[str, Any]], ranks: int, missing: Sequence[int]
) -> dict[str, Any]:
    """evenpipe.doctor/1."""
    return {
        "format": "evenpipe.doctor/1",
        "ok": not any(each.finding.verdict is Verdict.PROBLEM for each in said),
        "ranks": ranks,
        "missing": list(missing),
        "findings": [
            {
                "check": finding.check,
                "verdict": finding.verdict.value,
                "said": finding.said,
                "remedy": finding.remedy,
                "ranks": list(those),
            }
            for finding, those in said
        ],
        "pairs": list(pairs),
    }


def show(said: Sequence[Said], pairs: Sequence[Mapping[str, Any]], ranks: int, console: Console) -> None:
    """One table, the pairs below it, and how many problems there are."""
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_LOG
    table = Table("check", "", *(("ranks",) if ranks > 1 else ()), "found", box=None, pad_edge=False)
    last = None
    for finding, those in said:
        text = Text(finding.said)
        if finding.remedy is not None:
            text.append(f"\n→ {finding.remedy}", style=_STYLES[finding.verdict])
        head = Text("" if finding.check == last else finding.check)
        verdict = Text(finding.verdict.value, style=_STYLES[finding.verdict])
        table.add_row(head, verdict, *((Text(_spans(those)),) if ranks > 1 else ()), text)
        last = finding.check
    console.print(table)
    if pairs:
        console.print(_links(pairs))
    count = sum(each.finding.verdict is Verdict.PROBLEM for each in said)
    result = "no problems" if count == 0 else f"{count} problem{'s' if count > 1 else ''}"
    console.print(Text(f"\n{result}", style=_STYLES[Verdict.PROBLEM if count else Verdict.FINE]))


def _links(pairs: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("stages", "ranks", "link", "has GB/s", "needs GB/s", box=None, pad_edge=False, title_justify="left")
    table.title = "links between partners"
    for pair in pairs:
        need = pair["needs_gbps"]
        table.add_row(
            "-".join(map(str, pair["stages"])),
            "-".join(map(str, pair["ranks"])),
            "between nodes" if pair["crosses_nodes"] else "same node",
            f"{pair['gbps']:.2f}",
            "" if need is None else f"{need:.2f}",
        )
    return table


def _spans(ranks: Sequence[int]) -> str:
    """0-3, 7."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    return ", ".join("-".join(map(str, span)) for span in spans)
