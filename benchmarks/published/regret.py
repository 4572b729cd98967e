"""How much slower the planner's choice among measured runs is than the fastest of them: its measured regret.

``python -m benchmarks.published.regret`` prints every question to which more than one measured run is an answer: the
same model, cluster, samples of an iteration and precision. Runs whose estimate does not fit are not chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from .recipes import published
from .tables import estimators, taken
from .vtrain import iterations

__all__ = ["Answer", "Choice", "choices"]


class Answer(NamedTuple):
    """A measured run; ``estimated``: times the planner's own, infinite where it does not fit. Any unit of time."""

    name: str
    measured: float
    estimated: float


class Choice(NamedTuple):
    """The planner's choice among answers to one question, and the fastest of them."""

    question: str
    answers: int
    chosen: Answer
    fastest: Answer

    @property
    def regret(self) -> float:
        return self.chosen.measured / self.fastest.measured - 1


def choices() -> list[Choice]:
    """Return the choice for each question with more than one answer."""
    asked: dict[str, list[Answer]] = {}
    for question, answer in (*_of_bpipe(), *_of_vtrain(), *_of_nvidia()):
        asked.setdefault(question, []).append(answer)
    return [
        Choice(
            question,
            len(answers),
            min(answers, key=lambda one: one.estimated),
            min(answers, key=lambda one: one.measured),
        )
        for question, answers in asked.items()
        if len(answers) > 1
    ]


def _of_bpipe() -> Iterator[tuple[str, Answer]]:
    """Yield the rows of BPipe's Table 7 whose MFU is compared; the time is its reciprocal."""
    estimate = estimators()
    for row in taken():
        shown = estimate(row)
        name = f"t{row.t} p{row.p} b{row.b} {row.recompute}{' BPipe' * row.bpipe}"
        answer = Answer(name, 1 / row.mfu, 0.01 / shown.mfu if shown.fits else float("inf"))
        yield f"BPipe Table 7, {row.model}", answer
        if not row.bpipe:
            yield f"BPipe Table 7, {row.model}, no BPipe", answer


def _of_vtrain() -> Iterator[tuple[str, Answer]]:
    for one in iterations():
        yield f"vTrain, {one.asked}", Answer(one.run, one.ms, one.ms * (1 + one.error))


def _of_nvidia() -> Iterator[tuple[str, Answer]]:
    """Yield NVIDIA's iterations; what a search does not choose (dispatcher, graphs) may differ too."""
    for row in published():
        if row.seconds is not None:
            run, shown = row.run, row.estimate()
            asked = f"{row.model.name} {row.cluster.name} {run.quantized or 'bf16'} B{run.global_batch}"
            asked += f" s{row.model.sequence} mtp{row.model.mtp_layers}"
            name = f"t{run.tensor} p{run.stages} c{run.context} v{run.chunks} e{run.expert} {run.dispatcher}"
            name += " overlapped" * run.overlap_experts + "".join(f" {graph}" for graph in run.graphs)
            yield f"NVIDIA, {asked}", Answer(name, row.seconds, shown.iteration_ms / 1e3)


def main() -> None:
    shown = Table("question", "runs", "planner's choice", "fastest measured", "regret")
    for one in choices():
        shown.add_row(one.question, str(one.answers), one.chosen.name, one.fastest.name, f"{one.regret:.1%}")
    Console(width=170).print(shown)


if __name__ == "__main__":
    main()
