"""Four gloo processes that call Megatron's interleaving function, and EvenPipe's with the same model in a V.

Arguments: a folder (rank-<rank>.json out). A script of its own, forked after the imports.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import traceback
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
import schedule_function_cases as shared  # noqa: E402
from schedule_function_cases import COLLECTION, EVALUATION, EXPERTS, FULL, GATHERED, PP4_V2, TOKENS, WORLD, Call, Case  # noqa: E402

NO_DROPOUT = {"hidden_dropout": 0.0}
VARIABLE = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
RAGGED = (Call(ragged=True), Call(ragged=True, evaluate=True), Call(ragged=True, micro_batches=4))
BALANCED = {**EXPERTS, "num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01}
SYNCHRONISED = ("no_sync", "grad_sync", "param_sync")


def case(**settings: Any) -> Case:
    config = {**NO_DROPOUT, **settings.pop("config", {})}
    return Case(PP4_V2, config=config, optimizer={"clip_grad": 0.0}, **settings)


CASES = {
    "tied": case(calls=(Call(), EVALUATION, Call(micro_batches=4))),
    "loss per token": case(calls=TOKENS, config={"calculate_per_token_loss": True}),
    "other lengths": case(calls=RAGGED, config=VARIABLE),
    "what is no loss": case(calls=(Call(), COLLECTION)),
    "experts without a capacity": case(config=BALANCED),
    "recomputation": case(config=FULL),
    "bf16, delayed gradients": case(engine_layers=True, precision="bf16"),
    "synchronised as asked for": case(ddp=GATHERED, synchronise=SYNCHRONISED),
    "timers": case(timers=True),
    "searched": case(ddp=None, tied=False, calls=(Call(), Call())),
    "searched in the run": case(tied=False, calls=(Call(), Call(), Call(), EVALUATION, Call(micro_batches=4), Call())),
}


UNITS = {f"searched, {units} units": units for units in (4, 8)}
"""Schedules that are searched for uneven parts, and how many units a stage may hold."""

RECOMPUTED = "parts computed again"
"""V-Min with layers of parts 0, 3, 5 and 7 recomputed."""

LIMIT_BYTES, STATIC_BYTES = {"searched": 150_000, "searched, short of memory": 70_000}, 1000
"""Memory of a process in runs that search their own order, and what it holds of it."""

ORDERS = {
    "tied": ("v-half", "v-min", "zbv", "dualpipev"),
    "searched": (*UNITS, RECOMPUTED, "v-min"),
    "searched in the run": tuple(LIMIT_BYTES),
}
"""The schedules of a case; of others V-Half alone."""


def table_of(order: str) -> Path:
    """The file of a searched schedule."""
    return Path(sys.argv[1]) / f"{order}.txt"


def write_tables() -> None:
    from evenpipe.order_search.costs import Part
    from evenpipe.order_search.problem import Problem
    from evenpipe.order_search.search import Effort, search
    from evenpipe.schedule import Size, build, vee

    heavy = [1.05, *[1.0] * (2 * WORLD - 2), 1.4]
    parts = [Part(forward_ms=ms, input_gradient_ms=1.1 * ms, weight_gradient_ms=0.9 * ms) for ms in heavy]
    for order, units in UNITS.items():
        problem = Problem(vee(WORLD), Call().micro_batches, parts, [units] * WORLD, message_ms=0.1)
        table_of(order).write_text(str(search(problem, Effort(0.2)).best[0]))
    known = build("v-min", Size(WORLD, Call().micro_batches)).schedule
    table_of(RECOMPUTED).write_text(str(replace(known, name="recomputed", recomputed=frozenset([0, 3, 5, 7]))))


def carry_out(case: Case, order: str | None = None, placed: bool = True) -> dict[str, Any]:
    """All calls of a case, under Megatron's own function, or ours with that schedule.

    `placed`: with the model's chunks in a V, if the schedule is ours. What each call returned, with gradients, and in
    the end weights, by their place in the model.
    """
    from megatron.core import pipeline_parallel
    from tiny_pipeline import Pipeline, described

    from evenpipe.megatron.adaptive.schedule import Tuning
    from evenpipe.megatron.schedule import PipelineSchedule
    from evenpipe.megatron.searched import SearchedSchedule
    from evenpipe.megatron.vee import as_interleaved, vee_patches
    from evenpipe.order_search.search import Effort
    from evenpipe.runtime.resources import StageFigures

    ours = order is not None

    class Placed(Pipeline):
        """With weights by their place in the model, in a V where it is ours."""

        def _module(self, chunk: int) -> Any:
            from megatron.core import parallel_state

            with as_interleaved(chunk if ours and placed else None):
                self._stage = parallel_state.get_pipeline_model_parallel_rank()
                module = super()._module(chunk)
            for name, parameter in places(module).items():
                seed = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
                if parameter.dim() > 1:
                    generator = shared_generator(seed)
                    parameter.data.normal_(0.0, 0.02, generator=generator)
            return module

        def call(self, function: Any, call: Call, index: int) -> dict[str, Any]:
            found = super().call(function, call, index)
            gradients = {
                name: self._gradient(weight) for chunk in self.chunks for name, weight in places(chunk).items()
            }
            return {"losses": found["losses"], "gradients": described({} if call.evaluate else gradients)}

    with ExitStack() as entered:
        schedule = None
        if order is not None:
            entered.enter_context(vee_patches().in_force())
            lines: list[str] = []
            if order in LIMIT_BYTES:
                tuning = Tuning(LIMIT_BYTES[order], lambda: STATIC_BYTES, 1, log=lines.append)
                schedule = SearchedSchedule(tuning, measure=True, effort=Effort(0.1))
            else:
                of_file = order in UNITS or order == RECOMPUTED
                schedule = PipelineSchedule(f"file:{table_of(order)}" if of_file else order, measure=True)
            entered.enter_context(shared.in_place_of_megatrons(schedule))
        entered.enter_context(shared.laid_out(case.layout))
        pipeline = Placed(case, ours)
        function = pipeline_parallel.get_forward_backward_func()
        calls = [pipeline.call(function, call, index) for index, call in enumerate(case.calls)]
        weights = {name: weight for chunk in pipeline.chunks for name, weight in places(chunk).items()}
        found = {"calls": calls, "weights": described(weights), "timers": pipeline.timers()}
        if schedule is not None and schedule.executor is not None:
            figures = StageFigures.of(schedule.executor)
            found |= {"peak": figures.peak_live, "peak bytes": figures.peak_bytes, "lines": lines}
            if isinstance(schedule, SearchedSchedule):
                found["state"] = schedule.state_dict()
            schedule.close()
        return found


def refused_of(case: Case) -> str:
    """What is said of a model that was made for interleaved stages."""
    try:
        carry_out(case, "zbv", placed=False)
    except ValueError as error:
        return str(error)
    return "nothing"


def shared_generator(seed: int) -> Any:
    import torch

    return torch.Generator().manual_seed(seed)


def places(chunk: Any) -> dict[str, Any]:
    """The parameters of a chunk, layers by their number in the model, tied weights by one name."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    found = {}
    for name, parameter in chunk.named_parameters():
        if (match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)) is not None:
            name = f"layer {chunk.decoder.layers[int(match[1])].layer_number} {match[2]}"
        tied = name == "output_layer.weight" and chunk.share_embeddings_and_output_weights
        found["embedding.word_embeddings.weight" if tied else name] = parameter
    return found


def work(rank: int, folder: Path, port: int) -> None:
    """One process."""
    import torch.distributed as dist

    from evenpipe.megatron.cpu_mode import cpu_mode
    from tests.gloo import share_device

    cpu_mode().apply()
    share_device()
    store = dist.TCPStore("localhost", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    found: dict[str, Any] = {}
    try:
        for name, one in CASES.items():
            found[name] = {"megatron": carry_out(one)}
            found[name] |= {order: carry_out(one, order) for order in ORDERS.get(name, ("v-half",))}
        found["not placed"] = refused_of(CASES["tied"])
    except BaseException:
        found["failure"] = traceback.format_exc()
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    os._exit(0)


def main() -> None:
    """Fork, once everything is imported."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # what counts the tokens of experts would be compiled, for a device
    import fused_kernel
    import torch
    import torch.multiprocessing as mp
    from torch.distributed import TCPStore

    fused_kernel.install()
    import tiny_pipeline  # noqa: F401

    import evenpipe.megatron.schedule  # noqa: F401

    torch.set_num_threads(1)
    write_tables()
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(work, (Path(sys.argv[1]), store.port), nprocs=WORLD, start_method="fork")


if __name__ == "__main__":
    main()
