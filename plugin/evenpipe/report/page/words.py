"""Bubbles in words: who waits how long for what, and what else would be faster, as it was simulated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from evenpipe.report.page.content import Table, amount, milliseconds, percent
from evenpipe.report.remedies import Alternative, Case
from evenpipe.report.waits import Reason, Wait, Waits

__all__ = ["alternatives_table", "explained", "waits_table"]

#: Shares of a batch below this are not worth a sentence.
_TOLD: Final = 0.02
_MOST: Final = 6
#: What is predicted to be faster by less is no remedy.
_FASTER: Final = 1.01
#: From this part of a wait on, messages are told of.
_MESSAGES: Final = 0.2
#: How far a simulation may be off before that is said.
_ALIKE: Final = 0.1


def explained(waits: Waits, simulated: Sequence[Alternative]) -> list[str]:
    """Sentences, the one on most of the time first; `what is typed` is between such ticks.

    ``simulated``: as `alternatives` gives them, or nothing.
    """
    if not waits.stages:
        return ["No stage ever waits."]
    told = sorted((wait for wait in waits.stages if waits.share(wait) >= _TOLD), key=lambda wait: -wait.total_ms)
    neighbours = [wait for wait in told if wait.reason not in ("start", "end", "itself")]
    said = [f"{_wait(wait, waits)}: {_remedy(wait, waits, simulated)}." for wait in neighbours[:_MOST]]
    if len(neighbours) > _MOST:
        said.append(f"{len(neighbours) - _MOST} more waits of at least {percent(_TOLD)} are in the table below.")
    own = [wait for wait in told if wait.reason == "itself"]
    if own:
        stage, share = own[0].stage, percent(waits.share(own[0]))
        said.append(
            f"Stage {stage} spends {share} of the batch between actions for which all was there: work of its own "
            "process, such as Python's, or a processor that others use too. No schedule changes that."
        )
    return [_all_in_all(waits), *_doubts(waits, simulated), *_ends(waits, simulated), *said, *_uneven(simulated)]


def _all_in_all(waits: Waits) -> str:
    total: dict[Reason, float] = defaultdict(float)
    stages = {wait.stage for wait in waits.stages}
    messages = 0.0
    for wait in waits.stages:
        total[wait.reason] += wait.total_ms
        messages += wait.message_ms
    whole = waits.batch_ms * (1 + max(stages))
    senders = total["forward"] + total["backward"] - messages
    parts = {
        "before their first and after their last action": total["start"] + total["end"],
        "for neighbours that still compute": senders,
        "for messages under way": messages,
        "for what their partners keep": total["transfer"],
        "for nothing from elsewhere": total["itself"],
    }
    split = ", ".join(f"{percent(ms / whole)} {what}" for what, ms in parts.items() if ms / whole >= 0.005)
    return f"Stages stand still {percent(sum(parts.values()) / whole)} of the batch on the mean: {split}."


def _doubts(waits: Waits, simulated: Sequence[Alternative]) -> Iterator[str]:
    """Where the simulation of what was measured is not like it, neither are those of alternatives."""
    if simulated and abs(simulated[0].batch_ms / waits.batch_ms - 1) > _ALIKE:
        yield (
            f"From the medians of what its stages and messages took, this batch is simulated to take "
            f"{milliseconds(simulated[0].batch_ms)}, not {milliseconds(waits.batch_ms)}: times vary within it, and the "
            "predictions below hold for a batch of medians."
        )


def _wait(wait: Wait, waits: Waits) -> str:
    what = (
        "for what its partner keeps of it"
        if wait.reason == "transfer"
        else f"for {wait.reason} {wait.source}→{wait.stage}"
    )
    said = (
        f"Stage {wait.stage} waits {percent(waits.share(wait))} of the batch {what} ({milliseconds(wait.total_ms)} in "
    )
    said += f"{wait.times} {'wait' if wait.times == 1 else 'waits'}"
    if wait.message_ms > 0:
        said += f", {milliseconds(wait.message_ms)} of it for the message"
    return f"{said})"


def _remedy(wait: Wait, waits: Waits, simulated: Sequence[Alternative]) -> str:
    """Groups, where they halve what messages take of this wait; and what halves all of it, or else is the fastest.

    As fast as the simulator says.
    """
    if not simulated:
        return "alternatives need the schedule and its costs, which the document has not"
    present, *others = simulated
    faster = [one for one in others if present.batch_ms / one.batch_ms >= _FASTER and one.change != "more"]
    if not faster:
        return "nothing else that was simulated is faster"
    share = _part(wait, present.waits)[0] or waits.share(wait)
    hiding = [one for one in faster if _part(wait, one.waits)[0] <= share / 2]
    # Late gradients train another run; an other engine is another set-up.
    best = min(hiding or faster, key=lambda one: ("2bw" in one.flags, one.engine is not None, one.batch_ms))
    said = [(best, "would hide it" if hiding else "would be faster")]
    messages = _part(wait, present.waits)[1]
    grouped = [one for one in faster if "kfkb" in one.flags and _part(wait, one.waits)[1] <= messages / 2]
    if wait.message_ms >= _MESSAGES * wait.total_ms and grouped and grouped[0] is not best:
        said.insert(0, (grouped[0], "would hide its messages"))
    return "; ".join(f"{_change(one)} {how}, predicted {present.batch_ms / one.batch_ms:.2f}×" for one, how in said)


def _part(wait: Wait, waits: Waits) -> tuple[float, float]:
    """The part of the batch that the same wait takes elsewhere, and that its messages take of it."""
    key = (wait.stage, wait.reason, wait.source)
    same = [one for one in waits.stages if (one.stage, one.reason, one.source) == key]
    if not waits.batch_ms:
        return 0.0, 0.0
    return sum(map(waits.share, same)), sum(one.message_ms for one in same) / waits.batch_ms


def _change(one: Alternative) -> str:
    how = [f"`{words}`" for words in (one.flags, one.engine or "") if words and words != one.text]
    return f"{one.text} ({' '.join(how)})" if how else one.text


def _ends(waits: Waits, simulated: Sequence[Alternative]) -> Iterator[str]:
    """The pipeline fills and drains."""
    ms: dict[int, float] = defaultdict(float)
    for wait in waits.stages:
        if wait.reason in ("start", "end"):
            ms[wait.stage] += wait.total_ms
    stage = max(ms, key=lambda one: ms[one], default=None)
    if stage is None or ms[stage] < _TOLD * waits.batch_ms:
        return
    share = percent(ms[stage] / waits.batch_ms)
    said = f"While the pipeline fills and drains, stage {stage} stands still longest, {share}"
    present, *others = simulated or (None,)
    spreading = [
        f"{_change(one)}, predicted {present.batch_ms / one.batch_ms:.2f}×"
        for one in others
        if present is not None
        and (one.change == "more" or any(name in one.flags for name in ("2bw", "interleaved", "zb-h1")))
        and present.batch_ms / one.batch_ms >= _FASTER
    ]
    yield f"{said} of the batch" + (f": less with {'; with '.join(spreading)}." if spreading else ".")


def _uneven(simulated: Sequence[Alternative]) -> Iterator[str]:
    for one in simulated[1:]:
        gain = simulated[0].batch_ms / one.batch_ms
        if one.change == "even" and gain >= _FASTER:
            yield (
                "Stages do not take the same time for a micro-batch: of equal times, as `evenpipe partition` looks "
                f"for, the batch is predicted {gain:.2f}×."
            )


def waits_table(waits: Waits) -> Table:
    """All waits of a batch."""
    rows = [
        (
            f"stage {wait.stage}",
            _REASONS[wait.reason].format(wait=wait),
            str(wait.times),
            milliseconds(wait.total_ms),
            f"{percent(waits.share(wait), 1)}",
            milliseconds(wait.message_ms) if wait.source is not None else "",
            milliseconds(wait.longest_ms),
        )
        for wait in waits.stages
    ]
    columns = ("Stage", "Waits for", "Times", "In all", "Of the batch", "Message under way", "Longest")
    return Table("What each stage waits for", columns, rows)


_REASONS: Final[dict[Reason, str]] = {
    "start": "its first action",
    "forward": "forward {wait.source}→{wait.stage}",
    "backward": "backward {wait.source}→{wait.stage}",
    "transfer": "what its partner keeps",
    "itself": "nothing from elsewhere",
    "end": "the others, after its last action",
}


def alternatives_table(case: Case, simulated: Sequence[Alternative]) -> Table:
    """What else was simulated, the fastest first."""
    present = simulated[0]
    rows = [
        (
            one.text,
            milliseconds(one.batch_ms),
            f"{present.batch_ms / one.batch_ms:.2f}×",
            amount(one.peak) if case.unit_bytes is not None else f"{one.peak:g} micro-batches",
            one.flags,
            one.engine or "",
        )
        for one in simulated
    ]
    columns = ("Pipeline", "Batch, predicted", "Speed", "Fullest stage saves", "How", "Carried out by")
    caption = "What else was simulated, from the same times of stages and messages, for as many micro-batches"
    return Table(caption, columns, rows)
