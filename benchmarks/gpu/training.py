"""A training run in the processes of a part: as `evenpipe train` does it, with a word in before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evenpipe.schedule import EVICT
from evenpipe.train import data
from evenpipe.train.engine import Case, FailureContext, Recorder, engine_module
from evenpipe.train.options import OptionsError, TrainOptions
from evenpipe.train.result import RunResult
from evenpipe.train.run import Share, combine, gather, iterate

from .rank import Rank

__all__ = ["evicting_group", "options_of", "train"]


def evicting_group(stages: int) -> int:
    """The k of a kFkB that leaves BPipe something to evict: of two stages there is nothing with k = 1 or 2, or 1F1B."""
    return 4 if stages == 2 else 2


def options_of(rank: Rank, what: str, **given: Any) -> TrainOptions | None:
    """The options that are `given`, or None where `what` would show nothing, which is written down with the reason."""
    try:
        options = TrainOptions.of(**given)
    except OptionsError as error:
        rank.unchecked(what, str(error))
        return None
    if options.bpipe and not any(action.kind == EVICT for row in options.plan.actions for action in row):
        rank.unchecked(what, f"of {options.stages} stages BPipe has nothing to evict under this schedule")
        return None
    return options


def train(
    rank: Rank,
    options: TrainOptions,
    recorder: Recorder | None = None,
    before: Callable[[Any], object] = lambda engine: None,
    after: Callable[[Any, int], object] = lambda engine, done: None,
) -> RunResult | None:
    """The result on rank 0, None elsewhere. All ranks call it; those that the run does not need go on at once.

    `before` is given the engine, `after` that and the number of iterations done, after each of them.
    """
    if rank.number >= options.world_size:
        return None
    failure = FailureContext(rank.number)
    recorder = recorder or Recorder(failure)
    case = Case(options, data.load(options), rank.device, failure, recorder, lambda text: None)
    with rank.world(options.world_size), engine_module(options.engine).opened(case) as engine:
        before(engine)
        engine.begin(0)

        def ends_after(done: int) -> bool:
            after(engine, done)
            return done == options.iterations

        found = iterate(case, engine, 0, ends_after, lambda report: None)
        shares = gather(Share.of(engine, found, recorder), None)
    return None if shares is None else combine(shares)
