"""Four stages that train under an `AdaptiveSchedule` whose decisions are given, and write down what came of it.

Argument: a folder (rank-<rank>.json out). A script of its own, forked after the imports.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[3]))

if TYPE_CHECKING:
    from evenpipe.megatron.adaptive.schedule import AdaptiveSchedule
    from evenpipe.megatron.schedule import PipelineSchedule
    from evenpipe.megatron.train_engine.learner import Learner
    from evenpipe.tuner.loop import Conditions

STAGES, SIZE, MICRO_BATCHES = 4, 2, 8
MODEL = {"layers": 4, "hidden": 32, "heads": 4, "seq_length": 32, "stages": STAGES, "iterations": 9}
#: (k, b) of each iteration, of samples that the loader has in micro-batches of 2; those of `SAME` keep that size.
TURNS = ((1, 2), (3, 2), (2, 1), (5, 1), (2, 4), (1, 16), (1, 2), (4, 2))
SAME = ((1, 2), (3, 2), (8, 2), (2, 2))
LIMIT_BYTES = 1 << 30


def learner(dropout: float = 0.0, **others: Any) -> Learner:
    import torch

    from evenpipe.megatron.train_engine.learner import make_learner
    from evenpipe.train import data
    from evenpipe.train.options import TrainOptions

    sizes = {"micro_batch_size": SIZE, "micro_batches": MICRO_BATCHES}
    options = TrainOptions.of(**MODEL, **sizes, dropout=dropout, **others)
    return make_learner(options, data.load(options), torch.device("cpu"))


def train(of: Learner, schedule: PipelineSchedule, first: int, iterations: int) -> dict[str, Any]:
    """Losses on the last stage, a digest of the weights, and per iteration what was held and done."""
    from evenpipe.megatron.schedule import in_place_of_megatron
    from evenpipe.megatron.train_engine.learner import micro_batches, train_step
    from evenpipe.train.engine import FailureContext
    from evenpipe.train.run import digest

    found: dict[str, Any] = {"losses": [], "held": []}
    streams = micro_batches(of, first)
    patches = in_place_of_megatron(schedule)
    patches.apply()
    try:
        for _ in range(iterations):
            if schedule.executor is not None:
                schedule.executor.counter.reset_peak()
            reduced = train_step(of, streams, FailureContext(0)).reduced
            found["losses"].append(
                [(total / count).hex() for total, count in (one["lm loss"].tolist() for one in reduced)]
            )
            executor = schedule.executor
            assert executor is not None
            held = executor.counter
            found["held"].append(
                {
                    "micro_batches": len(reduced),
                    "peak_bytes": held.peak_bytes,
                    "evicted_bytes": held.evicted_bytes,
                    "own_bytes": held.own_bytes,
                    "slots": executor.pool.in_use,
                    "pool_bytes": executor.pool.allocated_bytes,
                    "channels": sorted(map(id, executor.connections.channels.values())),
                    "parameters": [
                        parameter.data_ptr() for chunk in of.replica.chunks for parameter in chunk.parameters()
                    ],
                }
            )
    finally:
        patches.revert()
    found["weights"] = digest(of.replica.chunks)
    return found


def adaptive(
    of: Learner,
    bpipe: bool,
    sizes: tuple[int, ...] | None = None,
    limit: int = LIMIT_BYTES,
    schedule: Any = "kfkb",
    log: Callable[[str], None] = lambda line: None,
) -> Any:
    from evenpipe.megatron.adaptive.schedule import AdaptiveSchedule, Tuning
    from evenpipe.megatron.adaptive.static_memory import static_bytes

    tuning = Tuning(
        limit,
        lambda: static_bytes(of.replica.chunks, of.optimizer),
        interval=1,
        sizes=lambda loaded, size: sizes,
        log=log,
    )
    return AdaptiveSchedule(tuning, bpipe, measure=True, schedule=schedule)


def unknown() -> Any:
    """A schedule with groups that the package does not know, so that its programs say what it holds."""
    from evenpipe.schedule import find

    return replace(find("kfkb"), name="unknown", live=None, settled=None)


def switching(
    turns: tuple[tuple[int, int], ...], bpipe: bool, dropout: float, schedule_of: Callable[[], Any] = lambda: "kfkb"
) -> dict[str, Any]:
    """`turns` are decided for, one after the other; with what was predicted for each."""
    from evenpipe.tuner.group_memory import saved_peaks
    from evenpipe.tuner.grouped import Candidate
    from evenpipe.tuner.loop import Conditions
    from evenpipe.tuner.tuner import Tuner

    of = learner(dropout)
    schedule: AdaptiveSchedule = adaptive(of, bpipe, tuple({b for _, b in turns}), schedule=schedule_of())
    samples = SIZE * MICRO_BATCHES
    wanted = [Candidate(k, b, samples // b) for k, b in turns]
    # What is tested is how a run switches, not between what: under the memory-limit curve lie more than candidates.
    decide, fitting = Tuner.decide, Conditions.fitting

    def decide_as_given(self: Tuner, iteration: int) -> tuple[Candidate, list[float], int]:
        _, estimates, following = decide(self, iteration)
        return wanted[iteration], estimates, following

    Tuner.decide = decide_as_given  # type: ignore[method-assign]
    Conditions.fitting = lambda *_: tuple(dict.fromkeys(wanted))  # type: ignore[method-assign]
    try:
        found = train(of, schedule, 0, len(turns))
    finally:
        Tuner.decide, Conditions.fitting = decide, fitting  # type: ignore[method-assign]
    assert schedule.loop.tuner is not None
    assert schedule.executor is not None
    assert schedule.loop.explored is not None
    grouped, memory = schedule.loop.explored.conditions.schedule, schedule.loop.explored.conditions.memory
    stage = schedule.executor.stage_index
    found["predicted"] = [saved_peaks(memory, candidate, grouped)[stage] for candidate in wanted]
    found["decided"] = [(retune.k, retune.b) for retune in schedule.loop.tuner.retunes]
    schedule.close()
    return found


def stock(iterations: int, dropout: float) -> dict[str, Any]:
    """1F1B with the loader's micro-batches."""
    from evenpipe.megatron.schedule import PipelineSchedule

    schedule = PipelineSchedule("1f1b", measure=True)
    found = train(learner(dropout), schedule, 0, iterations)
    schedule.close()
    return found


def limited() -> dict[str, Any]:
    """With memory for little more than 1F1B of single samples: what is decided, held and predicted."""
    of = learner()
    schedule: AdaptiveSchedule = adaptive(of, False)
    train(of, schedule, 0, 1)
    assert schedule.loop.tuner is not None
    assert schedule.executor is not None
    roomy = [list(candidate) for candidate in schedule.loop.tuner.candidates]
    assert schedule.loop.explored is not None
    memory = schedule.loop.explored.conditions.memory
    whole = [stage.static_bytes + stage.shared_bytes for stage in memory]
    limit = max(whole) + 6 * memory[0].sample_bytes
    schedule.close()
    of = learner()
    schedule = adaptive(of, False, limit=limit)
    found = train(of, schedule, 0, 3)
    found["static"] = memory[schedule.executor.stage_index].static_bytes if schedule.executor else 0
    assert schedule.loop.tuner is not None
    found |= {"roomy": roomy, "candidates": [list(one) for one in schedule.loop.tuner.candidates], "limit": limit}
    found["predicted"] = schedule.loop.predicted_saved_bytes
    schedule.close()
    schedule = adaptive(learner(), False, limit=max(whole) // 2)
    try:
        train(learner(), schedule, 0, 1)
    except ValueError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    schedule.close()
    return found


def resumed() -> dict[str, Any]:
    """A schedule that goes on with another's state: what it decides with, and that it rehearses nothing."""
    of = learner()
    schedule: AdaptiveSchedule = adaptive(of, False)
    train(of, schedule, 0, 3)
    state = json.loads(json.dumps(schedule.state_dict()))
    schedule.close()
    later: AdaptiveSchedule = adaptive(of, False)
    later.load_state_dict(state)
    later.iteration = 3
    found = train(of, later, 3, 1)
    after = later.state_dict()
    assert after is not None
    kept = ("format", "samples", "bpipe", "limit_bytes", "memory")
    found["kept"] = {name: state[name] == after[name] for name in kept}
    found["times"] = state["tuner"]["times"] == after["tuner"]["times"]
    found["next"] = [state["tuner"]["next"], after["tuner"]["next"], later.iteration]
    later.close()
    found["anew"] = {}
    for name, change in {"bpipe": {"bpipe": True}, "sizes": {"sizes": (2,)}, "memory": {}}.items():
        other: AdaptiveSchedule = adaptive(of, **{"bpipe": False, **change})
        heavier = [[2 * number for number in stage] for stage in state["memory"]]
        other.load_state_dict(state | ({"memory": heavier} if name == "memory" else {}))
        other.iteration = 4
        train(of, other, 4, 1)
        assert other.loop.tuner is not None
        found["anew"][name] = [retune.iteration for retune in other.loop.tuner.retunes]
        other.close()
    return found


def longest(of: Learner, iteration: int) -> int:
    """Of the micro-batches of an iteration."""
    return max(one.tokens.shape[1] for one in of.corpus.micro_batches(iteration, 0))


def lengths() -> dict[str, Any]:
    """Micro-batches of lengths of their own: the third batch has a longer one than before, with which k = 1 fits only.

    The largest group that fits is decided for, with BPipe, in much memory, until then.
    """
    from evenpipe.megatron.schedule import PipelineSchedule
    from evenpipe.schedule import Programs
    from evenpipe.tuner.group_memory import peak_bytes, saved_peaks
    from evenpipe.tuner.grouped import Candidate, GroupedSchedule
    from evenpipe.tuner.tuner import Tuner

    def of_lengths() -> Learner:
        return learner(min_length=2)

    of, seq_length = of_lengths(), int(MODEL["seq_length"])
    found: dict[str, Any] = {}
    first = next(
        iteration
        for iteration in itertools.count()
        if longest(of, iteration + 1) <= longest(of, iteration) <= 0.8 * seq_length
        and longest(of, iteration + 2) == seq_length
    )
    plain = PipelineSchedule("1f1b", measure=True)
    found["1f1b"] = train(of, plain, first, 4)
    plain.close()

    def tuned(bpipe: bool, limit: int, iterations: int) -> tuple[dict[str, Any], Conditions]:
        said: list[str] = []
        schedule: AdaptiveSchedule = adaptive(of := of_lengths(), bpipe, limit=limit, log=said.append)
        run = train(of, schedule, first, iterations)
        assert schedule.loop.explored is not None
        assert schedule.executor is not None
        conditions, tuner = schedule.loop.explored
        decided = [Candidate(one.k, one.b, MICRO_BATCHES) for one in tuner.retunes]
        stage = schedule.executor.stage_index
        saved = [saved_peaks(conditions.memory, one, conditions.schedule)[stage] for one in decided]
        run |= {"said": said, "decided": decided, "predicted": saved, "limit": limit}
        run["static"] = conditions.memory[stage].static_bytes
        schedule.close()
        return run, conditions

    decide = Tuner.decide

    def decide_for_the_last(self: Tuner, iteration: int) -> tuple[Candidate, list[float], int]:
        _, estimates, following = decide(self, iteration)
        return self.candidates[-1], estimates, following

    Tuner.decide = decide_for_the_last  # type: ignore[method-assign]
    try:
        found["bpipe"], rehearsed = tuned(True, LIMIT_BYTES, 2)
        grouped = GroupedSchedule(Programs("kfkb"), STAGES)
        limit = max(peak_bytes(rehearsed.memory, Candidate(2, SIZE, MICRO_BATCHES), grouped))
        found["kfkb"], _ = tuned(False, limit, 4)
    finally:
        Tuner.decide = decide  # type: ignore[method-assign]
    return found


CASES = {
    "1f1b": lambda: stock(len(TURNS), 0.0),
    "1f1b, dropout": lambda: stock(len(SAME), 0.1),
    "switching": lambda: switching(TURNS, False, 0.0),
    "switching, bpipe": lambda: switching(TURNS, True, 0.0),
    "same size, dropout": lambda: switching(SAME, False, 0.1, unknown),
    "limited": limited,
    "resumed": resumed,
    "lengths": lengths,
}


def work(rank: int, folder: Path, port: int) -> None:
    """One process: all cases."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from evenpipe.megatron.cpu_mode import cpu_mode
    from tests.gloo import share_device

    cpu_mode().apply()
    share_device()
    store = dist.TCPStore("localhost", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=STAGES, timeout=timedelta(seconds=60))
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=STAGES)
    found: dict[str, Any] = {}
    try:
        for name, case in CASES.items():
            found[name] = case()
            dist.barrier()
    except BaseException:
        found["failure"] = traceback.format_exc()
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    os._exit(0)


def main() -> None:
    """Fork, once everything is imported."""
    import torch
    import torch.multiprocessing as mp
    from torch.distributed import TCPStore

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(work, (Path(sys.argv[1]), store.port), nprocs=STAGES, start_method="fork")


if __name__ == "__main__":
    main()
