"""Trains as train_tiny does, with groups that are tuned: several cases in one job.

A case is {"case": {..}}, and as wanted "turns" ((k, b) to be decided for, one batch after the other), "loader" (the
engine reads the data itself), "choices" (the schedules to be chosen, by their names), "changes" (the micro-batches of
later batches), "even" (a searched order is for even stages), "said" (the job ends with a line) and "folder" (where a
checkpoint goes; a second engine then goes on from it).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import cycle, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from train_tiny import MICRO_BATCH, Case, digest, engine_of, run

from evenpipe.tuner import choosing
from evenpipe.tuner.grouped import Candidate
from evenpipe.tuner.searching import SearchLoop
from evenpipe.tuner.tuner import Tuner
from tests.even_times import even_times


def train(given: dict[str, Any]) -> dict[str, Any]:
    case = Case(**given["case"])
    turns = [tuple(turn) for turn in given.get("turns", ())]
    even = even_times(link=given["even"]) if "even" in given else nullcontext()
    with _deciding_for(turns), _choosing(given.get("choices", ())), even:
        engine, data = engine_of(case)
        if given.get("loader"):
            engine.data_iterator, data = data, None
        if "said" in given:
            return {"said": _said(engine, data)}
        found = _train(engine, data, case)
        if case.dynamic and "evenpipe" in case.config:
            found["refused"] = _refused(engine)
        if "changes" in given:
            engine.set_train_batch_size(given["changes"] * MICRO_BATCH * engine.grid.data_parallel_size)
            found["changed"] = _train(engine, data, case._replace(steps=2))
        if "folder" in given:
            engine.save_checkpoint(given["folder"], client_state={"mine": 7})
            again, data = engine_of(case)
            _, client_state = again.load_checkpoint(given["folder"])
            found["loaded"] = again.loop.state_dict()
            for _ in islice(data, case.steps * again.micro_batches):
                pass
            found["resumed"] = _train(again, data, case) | {"client_state": client_state}
    return found


def _said(engine: Any, data: Any) -> str:
    """What the job would end with, once it has looked at two batches at most."""
    module: Any = sys.modules[type(engine).__module__]
    ending = module.end_job
    module.end_job = sys.exit
    try:
        for _ in range(2):
            engine.train_batch(data)
    except SystemExit as ended:
        return str(ended)
    finally:
        module.end_job = ending
    return "nothing"


def _refused(engine: Any) -> str:
    """What is said of sizes of micro-batches that are to be chosen too."""
    from evenpipe.deepspeed import adaptive as module
    from evenpipe.deepspeed.section import SectionError

    engine.evenpipe = engine.evenpipe.model_copy(update={"micro_batch_size": "auto"})
    try:
        module._refuse(engine)
    except SectionError as error:
        return str(error)
    return "nothing"


def _train(engine: Any, data: Any, case: Case) -> dict[str, Any]:
    auto = hasattr(engine, "evenpipe")
    if auto:
        engine.executor.measure = True
    losses, evaluated = [], []
    for _ in range(case.steps):
        losses.append(float(engine.train_batch(data)).hex())
        if case.evaluate:
            evaluated.append(float(engine.eval_batch(data)).hex())
    found = {
        "engine": type(engine).__name__,
        "stage": engine.stage_id,
        "replica": engine.grid.data_parallel_id,
        "losses": losses,
        "evaluated": evaluated,
        "weights": {name: digest(weight) for name, weight in engine.module.named_parameters()},
        "size": [engine.micro_batch_size, engine.micro_batches, engine.gradient_accumulation_steps()],
    }
    if isinstance(getattr(engine, "loop", None), SearchLoop):
        found["state"] = engine.loop.state_dict()
    elif auto:
        assert engine.loop.tuner is not None
        found["retunes"] = [[retune.iteration, retune.k, retune.b] for retune in engine.loop.tuner.retunes]
        found["predicted"] = engine.loop.predicted_saved_bytes[engine.stage_id]
    if auto:
        found["evicted"] = engine.executor.counter.evicted_bytes
        found["swapped"] = engine.executor.counter.swapped_bytes
        found["peak_bytes"] = engine.executor.counter.peak_bytes
        found["left"] = engine.executor.counter.own_units
    return found


@contextmanager
def _deciding_for(turns: list[tuple[int, int]]) -> Iterator[None]:
    """What is tested is how a run switches, and not when: these are decided for, one after the other."""
    decide, wanted = Tuner.decide, cycle(turns)

    def decide_as_given(self: Tuner, iteration: int) -> tuple[Candidate, list[float], int]:
        _, estimates, following = decide(self, iteration)
        turn = next(wanted)
        return next(one for one in self.candidates if (one.k, one.b) == turn), estimates, following

    if turns:
        Tuner.decide = decide_as_given  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tuner.decide = decide  # type: ignore[method-assign]


@contextmanager
def _choosing(names: Sequence[str]) -> Iterator[None]:
    """Likewise these schedules are chosen."""
    choose, wanted = choosing.choose, cycle(names)

    def choose_as_given(*args: Any) -> tuple[choosing.Option, list[choosing.Option]]:
        chosen, others = choose(*args)
        name = next(wanted)
        taken = next(one for one in (chosen, *others) if one.name == name)
        return taken, [one for one in (chosen, *others) if one is not taken]

    if names:
        choosing.choose = choose_as_given  # type: ignore[assignment]
    try:
        yield
    finally:
        choosing.choose = choose


if __name__ == "__main__":
    run(train, Path(sys.argv[1]), Path(sys.argv[2]))
