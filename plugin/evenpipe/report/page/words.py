"""Bubbles in words: who waits how long for what, and what else would be faster, as it was simulated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from evenpipe.report.bubbles import Alternative, Case, Reason, Wait, Waits
from evenpipe.report.page.content import Table, amount, milliseconds, percent

__all__ = ["alternatives_table", "explained", "summary", "waits_table"]

#: Shares of a batch below this are not worth a sentence.
_TOLD: Final = 0.02
#: So many remedies at most, and so many waits one by one.
_MOST: Final = 3
_LONGEST: Final = 3
#: What does not wait for another stage.
_OWN: Final = ("start", "end", "itself")
#: What is predicted to be faster by less is no remedy.
_FASTER: Final = 1.01
#: From this part of a wait on, messages are told of.
_MESSAGES: Final = 0.2
#: How far a simulation may be off before that is said.
_ALIKE: Final = 0.1
#: Sizes that differ by less are said to be the same.
_SAME: Final = 0.01


def summary(waits: Waits) -> str:
    """Return how much of the batch stages are idle, and what for."""
    if not waits.stages:
        return "No stage ever waits."
    total: dict[Reason, float] = defaultdict(float)
    stages = {wait.stage for wait in waits.stages}
    messages = 0.0
    for wait in waits.stages:
        total[wait.reason] += wait.total_ms
        messages += wait.message_ms
    whole = waits.batch_ms * (1 + max(stages))
    senders = total["forward"] + total["backward"] - messages
    parts = {
        "before its first and after its last action": total["start"] + total["end"],
        "for neighbours that are still computing": senders,
        "for messages on their way": messages,
        "for what its partner keeps": total["transfer"],
        "although all that it needs is there": total["itself"],
    }
    split = ", ".join(f"{percent(ms / whole)} {what}" for what, ms in parts.items() if ms / whole >= 0.005)
    return f"On average, a stage is idle for {percent(sum(parts.values()) / whole)} of the batch: {split}."


def explained(waits: Waits, case: Case | None, simulated: Sequence[Alternative]) -> list[str]:
    """Sentences; `what is typed` is between such ticks.

    case, simulated: what was simulated, as `alternatives` gives it; None and nothing, where that was not done.
    """
    told = sorted((wait for wait in waits.stages if waits.share(wait) >= _TOLD), key=lambda wait: -wait.total_ms)
    neighbours = [wait for wait in told if wait.reason not in _OWN]
    said = [*_doubts(waits, simulated), *_ends(waits), *_longest(neighbours, waits)]
    if case is not None and simulated:
        said += [*_remedies(neighbours, waits, case, simulated), *_too_large(case, simulated)]
    own = [wait for wait in told if wait.reason == "itself"]
    if own:
        stage, share = own[0].stage, percent(waits.share(own[0]))
        said.append(
            f"For {share} of the batch, stage {stage} had all that its next action needed and did not start it: work "
            "of its own process, such as Python's, or a processor that others use too. No schedule changes that."
        )
    return said


def _doubts(waits: Waits, simulated: Sequence[Alternative]) -> Iterator[str]:
    """Where the simulation of what was measured is not like it, neither are those of alternatives."""
    if simulated and abs(simulated[0].batch_ms / waits.batch_ms - 1) > _ALIKE:
        yield (
            f"With the median times of its stages and messages, this batch is simulated to take "
            f"{milliseconds(simulated[0].batch_ms)}, not {milliseconds(waits.batch_ms)}: times vary within it, and "
            "what is predicted below holds for a batch of median times."
        )


def _ends(waits: Waits) -> Iterator[str]:
    """The pipeline fills and drains."""
    ms = _filling(waits)
    stage = max(ms, key=lambda one: ms[one], default=None)
    if stage is not None and ms[stage] >= _TOLD * waits.batch_ms:
        share = percent(ms[stage] / waits.batch_ms)
        yield f"While the pipeline fills and drains, stage {stage} is idle longest: {share} of the batch."


def _filling(waits: Waits) -> dict[int, float]:
    """By stage, the milliseconds before its first and after its last action."""
    ms: dict[int, float] = defaultdict(float)
    for wait in waits.stages:
        if wait.reason in ("start", "end"):
            ms[wait.stage] += wait.total_ms
    return ms


def _longest(neighbours: Sequence[Wait], waits: Waits) -> Iterator[str]:
    for number, wait in enumerate(neighbours[:_LONGEST]):
        what = "what its partner keeps of its own" if wait.reason == "transfer" else _link(wait)
        told = f"{milliseconds(wait.total_ms)} in {wait.times} {'wait' if wait.times == 1 else 'waits'}"
        if wait.message_ms > 0:
            told += f", {milliseconds(wait.message_ms)} of it for messages"
        said = f"Stage {wait.stage} waits {percent(waits.share(wait))} of the batch for {what} ({told})"
        others = len(neighbours) - _LONGEST
        if number == _LONGEST - 1 and others > 0:
            said += f"; {others} other {'wait is' if others == 1 else 'waits are'} in the table below"
        yield said + "."


def _remedies(neighbours: Sequence[Wait], waits: Waits, case: Case, simulated: Sequence[Alternative]) -> Iterator[str]:
    """Each remedy once, with all the waits that it is the best for; those first that are for most of the time."""
    present, *others = simulated
    faster = _one_grouping([one for one in others if one.fits and present.batch_ms / one.batch_ms >= _FASTER])
    if not faster:
        fits = " and fits" if any(not one.fits for one in others) else ""
        yield f"Nothing else that was simulated is faster{fits}."
        return
    effects = {one.text: _Effect([], [], 0.0) for one in faster}
    for wait in neighbours:
        for one, messages in _best_for(wait, present, faster):
            (effects[one.text].messages if messages else effects[one.text].waits).append(wait)
    filling = sum(_filling(waits).values())
    shorter = [one for one in faster if _filling_part(one.waits) < (1 - _ALIKE) * _filling_part(present.waits)]
    if shorter and max(_filling(waits).values()) >= _TOLD * waits.batch_ms:
        best = min(shorter, key=_price).text
        effects[best] = effects[best]._replace(filling_ms=filling)
    helpful = sorted((one for one in faster if effects[one.text].total_ms), key=lambda one: -effects[one.text].total_ms)
    for one in helpful[:_MOST] or [min(faster, key=_price)]:
        speed = f"{_change(one)}: predicted {present.batch_ms / one.batch_ms:.2f}×"
        speed += " for as many micro-batches" if one.change == "more" else ""
        yield f"{speed}{_does(effects[one.text])}{_memory(one, present, case)}."


def _one_grouping(faster: Sequence[Alternative]) -> list[Alternative]:
    """Return ``faster`` with one group size left: the one that saves least, of those as good as the fastest."""
    grouped = [one for one in faster if _grouped(one)]
    alike = [one for one in grouped if one.batch_ms <= _FASTER * grouped[0].batch_ms]
    best = min(alike, key=lambda one: one.peak, default=None)
    return [one for one in faster if not _grouped(one) or one is best]


def _grouped(one: Alternative) -> bool:
    return "kfkb" in one.flags


class _Effect(NamedTuple):
    """Waits that a remedy halves at least; waits whose messages it halves; what filling and draining takes now."""

    waits: list[Wait]
    messages: list[Wait]
    filling_ms: float

    @property
    def total_ms(self) -> float:
        whole, messages = sum(wait.total_ms for wait in self.waits), sum(wait.message_ms for wait in self.messages)
        return whole + messages + self.filling_ms


def _price(one: Alternative) -> tuple[int, bool, float]:
    """Late gradients train another run, and larger batches another too; another engine is another set-up."""
    return 2 * ("2bw" in one.flags) + (one.change == "more"), one.engine is not None, one.batch_ms


def _best_for(wait: Wait, present: Alternative, faster: Sequence[Alternative]) -> Iterator[tuple[Alternative, bool]]:
    """Yield the alternative that at least halves the wait, with False.

    If messages are much of the wait, another one comes before it, with True: the groups that halve what messages take.
    """
    share, messages = _part(wait, present.waits)
    hiding = [one for one in faster if one.change != "more" and share and _part(wait, one.waits)[0] <= share / 2]
    best = min(hiding, key=_price, default=None)
    grouped = [one for one in faster if _grouped(one) and _part(wait, one.waits)[1] <= messages / 2]
    if wait.message_ms >= _MESSAGES * wait.total_ms and grouped and grouped[0] is not best:
        yield grouped[0], True
    if best is not None:
        yield best, False


def _part(wait: Wait, waits: Waits) -> tuple[float, float]:
    """Return the part of the batch that the same wait takes elsewhere, and that its messages take of it."""
    key = (wait.stage, wait.reason, wait.source)
    same = [one for one in waits.stages if (one.stage, one.reason, one.source) == key]
    if not waits.batch_ms:
        return 0.0, 0.0
    return sum(map(waits.share, same)), sum(one.message_ms for one in same) / waits.batch_ms


def _filling_part(waits: Waits) -> float:
    return sum(_filling(waits).values()) / waits.batch_ms if waits.batch_ms else 0.0


def _change(one: Alternative) -> str:
    if one.change == "transfers":
        return "Without BPipe (leave out `--bpipe`)"
    if one.change == "even":
        return "Stages of equal times, for which `evenpipe partition` looks"
    flags = " ".join(words for words in (one.flags, one.engine or "") if words)
    text = one.text if one.change == "schedule" else one.text[0].upper() + one.text[1:]
    return f"{text} (`{flags}`)" if flags else text


def _does(effect: _Effect) -> str:
    said = []
    if effect.waits:
        said.append(f"the {_of(effect.waits)} would at least be halved")
    if effect.messages:
        said.append(f"what messages take of the {_of(effect.messages)} would at least be halved")
    if effect.filling_ms:
        said.append("less of the time would go to filling and draining")
    return "".join(f". {one[0].upper()}{one[1:]}" for one in said)


def _of(waits: Sequence[Wait]) -> str:
    """Such as: waits of stage 0 for backward 1→0, and of stage 1 for forward 0→1."""
    each = [f"of stage {wait.stage} for {_link(wait)}" for wait in waits[:_LONGEST]]
    others = len(waits) - _LONGEST
    each += [f"{others} more"] if others > 0 else []
    return ("waits " if len(waits) > 1 else "wait ") + _listed(each)


def _listed(each: Sequence[str]) -> str:
    *first, last = each
    return f"{', '.join(first)} and {last}" if first else last


def _link(wait: Wait) -> str:
    return "its partner" if wait.reason == "transfer" else f"{wait.reason} {wait.source}→{wait.stage}"


def _memory(one: Alternative, present: Alternative, case: Case) -> str:
    """Return what the fullest stage would hold, beside what it holds now."""
    ratio = one.peak / present.peak if present.peak else 1.0
    sized = case.unit_bytes is not None
    now, then = _held(present, sized), _held(one, sized)
    said = ". Its fullest stage would save "
    if one.change in ("even", "more", "transfers"):
        said = ". The fullest stage would save "
    said += f"as much as now, {now}" if abs(ratio - 1) < _SAME else f"{ratio:.2g}× as much, {then} in place of {now}"
    if one.versions > present.versions:
        size = f" (up to {amount(one.version_bytes)} more)" if one.version_bytes else ""
        said += f", and keep a second version of its weights{size}"
    if one.needs is not None and case.room is not None and case.room.limit_bytes is not None:
        said += f"; it would need {amount(one.needs)} of {amount(case.room.limit_bytes)} in all"
    return said


def _held(one: Alternative, sized: bool) -> str:
    return amount(one.peak) if sized else f"{one.peak:g} micro-batch{'' if one.peak == 1 else 'es'}"


def _too_large(case: Case, simulated: Sequence[Alternative]) -> Iterator[str]:
    """Yield a line on what would be faster, if there were room for it."""
    present, *others = simulated
    if case.room is None or case.room.limit_bytes is None:
        return
    large = [one for one in others if not one.fits and present.batch_ms / one.batch_ms >= _FASTER]
    each = [f"{one.text} (needs {amount(one.needs or 0)})" for one in _one_grouping(large)]
    if each:
        limit = amount(case.room.limit_bytes)
        yield f"Faster by the simulator, but too large for the {limit} that a stage has: {_listed(each)}."


def waits_table(waits: Waits) -> Table:
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
    "itself": "its own process: all that it needs is there",
    "end": "the others, after its last action",
}


def alternatives_table(case: Case, simulated: Sequence[Alternative]) -> Table:
    """Return what else was simulated, the fastest first."""
    present = simulated[0]
    limit = None if case.room is None else case.room.limit_bytes
    needs = any(one.needs is not None for one in simulated)
    rows = [
        (
            one.text,
            milliseconds(one.batch_ms),
            f"{present.batch_ms / one.batch_ms:.2f}×",
            _held(one, case.unit_bytes is not None),
            *([_needs(one, limit)] if needs else []),
            one.flags,
            one.engine or "",
        )
        for one in simulated
    ]
    of_limit = "" if limit is None else f", of {amount(limit)}"
    in_all = [f"Fullest stage needs in all{of_limit}"] if needs else []
    columns = ("Pipeline", "Batch, predicted", "Speed", "Fullest stage saves", *in_all, "How", "Carried out by")
    caption = "What else was simulated, from the same times of stages and messages, for as many micro-batches"
    return Table(caption, columns, rows)


def _needs(one: Alternative, limit_bytes: int | None) -> str:
    if one.needs is None:
        return ""
    return amount(one.needs) + ("" if one.fits or limit_bytes is None else ": does not fit")
