"""Four gloo processes that call Megatron's pipelining functions and EvenPipe's, and write down what came of it.

Arguments: a folder (rank-<rank>.json out), and the names of the cases as a JSON list. A script of its own, forked after
the imports.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from evenpipe.megatron.schedule import PipelineSchedule
    from evenpipe.schedule import Schedule

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.even_times import even_times

WORLD = 4
PLAIN = ("megatron", "1f1b")
ENGINES = ("megatron", "bpipe")  # which does all that 1f1b does, and evicts
GROUPED = (*ENGINES, "3F3B")
HALVES = "zb-h1"
SPLIT = (HALVES, "zb-h2", "interleaved-zb")  # all whose backwards are in halves


class Layout(NamedTuple):
    """How four processes divide the model: the rest of them is data-parallel."""

    stages: int
    chunks: int = 1
    tensor: int = 1


PP1, PP4, PP4_V2 = Layout(1), Layout(4), Layout(4, 2)
PP2, PP2_V3, TP2_PP2 = Layout(2), Layout(2, 3), Layout(2, tensor=2)
BOUND = {"PP1": PP1, "PP4": PP4, "PP4 V2": PP4_V2}  # the layouts in which the patch is looked at


@dataclass(frozen=True)
class Call:
    """One call of the function with an optimizer step after it, or an evaluation without.

    `ragged` micro-batches differ in length; `packed` ones are a row of sequences, and differ too. `loss`: "pair" (loss,
    report) or "triple" (loss, tokens, report). `arguments` are added to those that every call has, or replace them.
    `groups` are given explicitly: both, or one of them. `force_all_reduce` is asked for where Megatron knows it.
    """

    evaluate: bool = False
    micro_batches: int = 8
    sequence: int = 8
    ragged: bool = False
    packed: bool = False
    loss: str = "pair"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    force_all_reduce: bool = False
    model_as_list: bool = False
    iterator_as_list: bool = False


@dataclass(frozen=True)
class Case:
    """A tiny GPT and the calls that are made for it.

    With `engine_layers`, linear layers are like Transformer Engine's, and delay their gradients under our schedules.
    `config`, `ddp` and `optimizer` are settings of Megatron's; without `ddp` the modules stay bare, without
    synchronisation of gradients. `synchronise` names what of DDP's the configuration refers to.
    """

    layout: Layout = PP4
    calls: tuple[Call, ...] = (Call(), Call(micro_batches=4))
    config: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] | None = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    tied: bool = True
    loss_scale: float | None = None
    synchronise: tuple[str, ...] = ()
    timers: bool = False
    engine_layers: bool = False
    engines: tuple[str, ...] = ENGINES


def halved(receive: list[Any], send: list[Any]) -> tuple[list[Any], list[Any]]:
    """For `adjust_tensor_shapes_fn`: half the sequence."""
    return [(s // 2, b, h) for s, b, h in receive], [(s // 2, b, h) for s, b, h in send]


EVALUATION = Call(evaluate=True)
COLLECTION = Call(evaluate=True, arguments={"collect_non_loss_data": True, "first_val_step": True})
TOKENS = (Call(loss="triple"), Call(loss="triple", micro_batches=4))
GIVEN = Call(groups=("communicator", "groups"), force_all_reduce=True, micro_batches=4)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# So many of the micro-batches that a stage holds recompute nothing: with one, BPipe evicts none of those.
PARTIAL = {"num_microbatches_with_partial_activation_checkpoints": 1, **FULL}
PARTIAL_2 = {"num_microbatches_with_partial_activation_checkpoints": 2, **FULL}
PARTIAL_4 = {"num_microbatches_with_partial_activation_checkpoints": 4, **FULL}
SHARDED = {"use_distributed_optimizer": True, "overlap_param_gather": True}
GATHERED = {**SHARDED, "overlap_grad_reduce": True, "bucket_size": 500}
REDUCED = {"overlap_grad_reduce": True, "bucket_size": 500}
FUSED = {"gradient_accumulation_fusion": True}
MEASURED = ("megatron", "measured")
TABLE = "searched table that swaps"
SWAPPING = "searches and swaps"
SWAPPED = ("measured", "swap 0.8", "swap 0.8 bpipe")
#: Of the peak of the worst stage.
CAPS = ("cap 0.9", "cap 0.75", "cap 0.6", "cap 0.45")
#: The same, where copies to the host count as slow.
RECOMPUTED = "cap 0.5 recomputed"
#: The same, where stages may send to partners.
PARTNERS = "cap 0.85 partners"
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
PARTS = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"], "add_bias_linear": False}
EXPERTS = {"num_moe_experts": 2, "moe_token_dispatcher_type": "allgather", "add_bias_linear": False}
PADDED = {
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
    "moe_token_dispatcher_type": "alltoall",
}
# The bias is large, and new, after each batch.
BY_BATCH = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.1,
    "moe_router_load_balancing_type": ["global_aux_loss"],
    "moe_aux_loss_coeff": [0.1],
}
RAGGED = (Call(ragged=True), Call(ragged=True, micro_batches=4), Call(ragged=True, evaluate=True))
PACKED = (Call(packed=True), Call(packed=True, sequence=12))
VARIABLE = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}  # which it wants, experts or not
# Parameters are gathered ahead from the second batch on.
SEVERAL = (Call(micro_batches=4), Call(), EVALUATION, Call(micro_batches=4))

CASES = {
    "bare modules": Case(ddp=None, engines=(*PLAIN, "bpipe", HALVES)),
    "swaps": Case(engines=("megatron", *SWAPPED, "swap 0.5", "swap 0.8 zb-h1", *CAPS)),
    "swaps by a table": Case(calls=(Call(), Call()), engines=("megatron", TABLE)),
    "caps, from one micro-batch on": Case(
        calls=(Call(micro_batches=1), Call(), Call()), engines=("megatron", "measured", "cap 0.6")
    ),
    "caps, partners": Case(config=PARTS, engines=("megatron", "measured", PARTNERS)),
    "caps, uneven layout": Case(
        config={"num_layers": 8, "pipeline_model_parallel_layout": "Et|ttttt|tt|L"},
        engines=("megatron", "measured", *CAPS, RECOMPUTED),
    ),
    "swaps of experts": Case(
        config={**EXPERTS, "num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01},
        precision="bf16",
        engines=("megatron", *SWAPPED, *CAPS, RECOMPUTED),
    ),
    "swaps of lengths of their own": Case(calls=RAGGED, config=VARIABLE, engines=("megatron", "swap 0.5 bpipe")),
    "interleaved, swaps": Case(PP4_V2, engines=("megatron", "measured", "swap 0.8", "cap 0.6", RECOMPUTED)),
    "memory for a searched order": Case(
        calls=(Call(), Call(), Call(), Call()), engines=("megatron", "searched", SWAPPING)
    ),
    "lists of one": Case(
        calls=(Call(model_as_list=True, iterator_as_list=True), Call(model_as_list=True), Call(iterator_as_list=True))
    ),
    "loss of tokens": Case(calls=TOKENS),
    "loss per token": Case(calls=TOKENS, config={"calculate_per_token_loss": True}, engines=(*ENGINES, HALVES)),
    "outputs kept": Case(config={"deallocate_pipeline_outputs": False}),
    "scaled loss": Case(loss_scale=128.0),
    "bf16": Case(precision="bf16", engines=(*ENGINES, HALVES)),
    "timers": Case(timers=True, engines=(*ENGINES, HALVES)),
    "given groups": Case(calls=(GIVEN, GIVEN)),
    "given only a communicator": Case(calls=(Call(groups=("communicator",)),)),
    "given only groups": Case(calls=(Call(groups=("groups",)),)),
    "partial recomputation": Case(config=PARTIAL, engines=(*PLAIN, "3F3B", HALVES)),
    "partial recomputation with BPipe": Case(config=PARTIAL_2),
    "recomputation of a block, fp16, untied": Case(
        calls=(Call(), Call()),
        config={**BLOCK, "num_layers": 8},
        optimizer={"initial_loss_scale": 256.0},
        precision="fp16",
        tied=False,
        engines=(*ENGINES, HALVES),
    ),
    "recomputation of parts": Case(calls=(Call(),), config={**PARTS, "num_layers": 8}, engines=(*ENGINES, HALVES)),
    "experts of one capacity": Case(calls=(Call(),), config={**EXPERTS, **PADDED}),
    "experts without a capacity": Case(
        config={**EXPERTS, "num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01},
        engines=(*ENGINES, "3F3B", HALVES),
    ),
    "experts that a whole batch balances": Case(
        calls=(Call(), Call(), Call()),
        config={**EXPERTS, **BY_BATCH},
        engines=(*ENGINES, "auto"),
    ),
    "recomputation of experts": Case(
        calls=(Call(),),
        config={**EXPERTS, "recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ),
    "uneven layout": Case(
        calls=(Call(),),
        config={"num_layers": 4, "pipeline_model_parallel_layout": "E|ttt|t|L"},
        engines=(*ENGINES, HALVES),
    ),
    "adjusted shapes": Case(calls=(Call(arguments={"seq_length": 16, "adjust_tensor_shapes_fn": halved}),)),
    "length of the decoder": Case(calls=(Call(arguments={"seq_length": 16, "decoder_seq_length": 8}),)),
    "evaluation between batches": Case(calls=(EVALUATION, Call(), EVALUATION, Call(micro_batches=4))),
    "collection between batches": Case(calls=(Call(), COLLECTION, Call(micro_batches=4))),
    "other numbers of micro-batches": Case(
        calls=(Call(micro_batches=2), Call(), Call(micro_batches=5)), engines=(*GROUPED, "1f1b", HALVES, "zb-h2")
    ),
    "other lengths": Case(calls=(Call(), Call(sequence=12, micro_batches=4), Call(sequence=4, micro_batches=4))),
    "micro-batches of lengths of their own": Case(calls=RAGGED, config=VARIABLE, engines=(*GROUPED, HALVES)),
    "packed sequences": Case(calls=PACKED, config=VARIABLE, engines=(*ENGINES, "3F3B", "auto", HALVES)),
    "interleaved, bare modules": Case(PP4_V2, ddp=None),
    "interleaved, loss per token": Case(PP4_V2, calls=TOKENS, config={"calculate_per_token_loss": True}),
    "interleaved, given groups": Case(PP4_V2, calls=(GIVEN, GIVEN)),
    "interleaved, given only a communicator": Case(PP4_V2, calls=(Call(groups=("communicator",)),)),
    "interleaved, partial recomputation": Case(PP4_V2, config=PARTIAL_4),
    "interleaved, uneven layout, recomputation": Case(
        PP4_V2,
        calls=(Call(),),
        config={**BLOCK, "num_layers": 8, "pipeline_model_parallel_layout": "E|tt|t|t|tt|t|t|L"},
    ),
    "interleaved, length of the decoder": Case(PP4_V2, calls=(Call(arguments={"decoder_seq_length": 4}),)),
    "interleaved, evaluation between batches": Case(
        PP4_V2, calls=(EVALUATION, Call(), COLLECTION, Call(micro_batches=4))
    ),
    "interleaved, other numbers of micro-batches": Case(PP4_V2, calls=(Call(micro_batches=4), Call())),
    "interleaved, micro-batches of lengths of their own": Case(PP4_V2, calls=RAGGED, config=VARIABLE),
    "interleaved, in groups of six": Case(
        PP4_V2,
        calls=(Call(micro_batches=6), Call(micro_batches=10)),
        config={"microbatch_group_size_per_vp_stage": 6},
        engines=(*ENGINES, "interleaved-zb"),
    ),
    "interleaved, other lengths": Case(PP4_V2, calls=(Call(), Call(sequence=12))),
    "overlapped reduction": Case(PP2, ddp=REDUCED, synchronise=("no_sync",), engines=(*ENGINES, HALVES)),
    "aligned reduction": Case(PP2, ddp=REDUCED, synchronise=("no_sync", "grad_sync"), engines=(*GROUPED, HALVES)),
    "distributed optimizer": Case(
        PP2,
        SEVERAL,
        ddp=GATHERED,
        optimizer=SHARDED,
        synchronise=("no_sync", "grad_sync", "param_sync"),
        engines=(*GROUPED, "1f1b", HALVES),
    ),
    "interleaved, overlapped reduction": Case(PP2_V3, ddp=REDUCED, synchronise=("no_sync",)),
    "interleaved, aligned reduction": Case(PP2_V3, ddp=REDUCED, synchronise=("no_sync", "grad_sync")),
    "interleaved, distributed optimizer": Case(
        PP2_V3,
        SEVERAL,
        ddp=GATHERED,
        optimizer=SHARDED,
        synchronise=("no_sync", "grad_sync", "param_sync"),
        engines=(*ENGINES, "1f1b", "interleaved-zb"),
    ),
    "fused gradients": Case(
        config=FUSED, ddp=REDUCED, synchronise=("no_sync",), precision="bf16", engines=(*ENGINES, HALVES)
    ),
    "fused gradients, distributed optimizer": Case(
        PP2,
        SEVERAL,
        config=FUSED,
        ddp=GATHERED,
        optimizer=SHARDED,
        synchronise=("no_sync", "grad_sync", "param_sync"),
        engines=(*MEASURED, HALVES),
    ),
    "layers of Transformer Engine's kind": Case(
        PP2,
        SEVERAL,
        config={"num_layers": 4},
        ddp=GATHERED,
        optimizer=SHARDED,
        synchronise=("no_sync", "grad_sync", "param_sync"),
        precision="bf16",
        engine_layers=True,
        engines=("megatron", HALVES),
    ),
    "sequence parallel, recomputation": Case(
        TP2_PP2,
        config={"sequence_parallel": True, "num_layers": 4, **BLOCK},
        engines=(*MEASURED, HALVES),
    ),
}
STRAIGHT = {f"searched for {stages} stages": stages for stages in (2, 4)}
"""Orders of whole stages, with backwards in halves, that are searched for uneven times under a cap."""
IN_OTHER_HALVES = {
    name: f"{name}, other halves"
    for name in (
        "sequence parallel, recomputation",
        "distributed optimizer",
        "experts without a capacity",
        "recomputation of a block, fp16, untied",
        "recomputation of parts",
        "bf16",
        "uneven layout",
    )
}
CASES |= {
    long: replace(
        CASES[name],
        calls=(Call(), EVALUATION, Call()),
        engines=("megatron", "zb-h2", f"searched for {CASES[name].layout.stages} stages"),
    )
    for name, long in IN_OTHER_HALVES.items()
}
# What takes long, or differs little from a case that is not among these.
LONG = {
    *IN_OTHER_HALVES.values(),
    "micro-batches of lengths of their own",
    "aligned reduction",
    "lists of one",
    "scaled loss",
    "bf16",
    "evaluation between batches",
    "interleaved, partial recomputation",
    "interleaved, other numbers of micro-batches",
    "interleaved, micro-batches of lengths of their own",
    "outputs kept",
    "loss of tokens",
    "recomputation of parts",
    "experts of one capacity",
    "recomputation of experts",
    "adjusted shapes",
    "length of the decoder",
    "other lengths",
    "interleaved, bare modules",
    "interleaved, given groups",
    "interleaved, loss per token",
    "interleaved, length of the decoder",
    "interleaved, evaluation between batches",
    "interleaved, other lengths",
    "interleaved, uneven layout, recomputation",
    "overlapped reduction",
    "interleaved, overlapped reduction",
    "interleaved, aligned reduction",
    "fused gradients, distributed optimizer",
}


def schedule_of(engine: str, peak: int = 0, room: int = 0) -> PipelineSchedule:
    """Return what is behind the patched function; a cap is a part of `peak`, beside `room` for messages, in bytes."""
    from evenpipe.megatron.schedule import PipelineSchedule

    if engine.startswith("cap"):
        from evenpipe.megatron.adaptive.schedule import Tuning
        from evenpipe.megatron.capped import CappedSchedule

        def set_speed(schedule: PipelineSchedule) -> None:
            assert schedule.executor is not None
            assert schedule.executor.swaps is not None
            slow = float(engine in (RECOMPUTED, PARTNERS))
            schedule.executor.swaps.link.ms_a_byte = lambda: slow  # type: ignore[method-assign]

        tuning = Tuning(int(float(engine.split()[1]) * peak) + room, int)
        return CappedSchedule(tuning, measure=True, connected=set_speed, bpipe=engine == PARTNERS)

    if engine == "auto":
        from evenpipe.megatron.adaptive.schedule import AdaptiveSchedule, Tuning

        tuning = Tuning(limit_bytes=1 << 30, static_bytes=int, interval=1, sizes=lambda loaded, size: [size])
        return AdaptiveSchedule(tuning)
    if engine in ("searched", SWAPPING):
        from evenpipe.megatron.adaptive.schedule import Tuning
        from evenpipe.megatron.searched import SearchedSchedule
        from evenpipe.order_search.search import Effort

        return SearchedSchedule(Tuning(1 << 30, int), effort=Effort(0.1), swaps=engine == SWAPPING)
    if engine == TABLE:
        from evenpipe.schedule import Spec, needs_of

        table = searched_table()
        return PipelineSchedule(Spec.of(table, needs_of(table)), measure=True, swap=1.0)
    if engine in STRAIGHT:
        from evenpipe.schedule import Spec, needs_of

        table = straight_table(STRAIGHT[engine])
        return PipelineSchedule(Spec.of(table, needs_of(table)))
    if engine in SPLIT:
        return PipelineSchedule(engine)
    if engine.startswith("swap"):
        share, *more = engine.split()[1:]
        name = next((one for one in more if one in SPLIT), "1f1b")
        return PipelineSchedule(name, bpipe="bpipe" in more, measure=True, swap=float(share))
    if engine == "3F3B":
        return PipelineSchedule("kfkb", group_size=3)
    return PipelineSchedule(bpipe=engine == "bpipe", measure=engine == "measured")


def searched_table() -> Schedule:
    """An order for four even stages that hold three micro-batches each, and swap others in a forward."""
    from evenpipe.order_search.costs import Part, RunCosts
    from evenpipe.order_search.search import Effort
    from evenpipe.simulate.searched import searched

    part = Part(forward_ms=2, input_gradient_ms=2, weight_gradient_ms=2, saved_bytes=100)
    costs = RunCosts(format="evenpipe.costs/1", placement="straight", parts=[part] * WORLD, host_bytes_per_ms=50)
    capped = costs.model_copy(update={"memory_bytes": [300] * WORLD})
    return searched(capped, WORLD, Call().micro_batches, Effort(0.1, 2)).program.schedule


def straight_table(stages: int) -> Schedule:
    """An order for a slow last stage, whose stages hold two micro-batches of two stages, three of four."""
    from evenpipe.order_search.costs import Part
    from evenpipe.order_search.problem import Problem
    from evenpipe.order_search.search import Effort, search
    from evenpipe.schedule import loop

    part = Part(forward_ms=2, input_gradient_ms=2.2, weight_gradient_ms=1.8)
    slow = Part(forward_ms=3, input_gradient_ms=3, weight_gradient_ms=2)
    caps = [1 + stages // 2] * stages
    problem = Problem(loop(stages), Call().micro_batches, [*[part] * (stages - 1), slow], caps, message_ms=0.2)
    return search(problem, Effort(0.1, 2)).best[0]


@contextmanager
def in_place_of_megatrons(schedule: Callable[..., Any]) -> Iterator[None]:
    from evenpipe.megatron.schedule import in_place_of_megatron

    patches = in_place_of_megatron(schedule)
    patches.apply()
    try:
        yield
    finally:
        patches.revert()


class Current:
    """Calls the schedule of the case under way, so that the patches, which look for a name everywhere, stay on."""

    schedule: PipelineSchedule
    needs = frozenset(["split"])

    def __call__(self, **arguments: Any) -> Any:
        return self.schedule(**arguments)


def carry_out_all(cases: Mapping[str, Case]) -> dict[str, dict[str, Any]]:
    """By case and engine; Megatron's own comes first."""
    import torch
    import torch.distributed as dist

    from evenpipe.tuner.searching import UNDER_WAY

    found: dict[str, dict[str, Any]] = {name: {} for name in cases}
    for name, case in cases.items():
        if "megatron" in case.engines:
            found[name]["megatron"] = carry_out(case)
        dist.barrier()
    current = Current()
    with in_place_of_megatrons(current):
        for name, case in cases.items():
            whole: list[int] = []
            for engine in case.engines:
                if engine != "megatron":
                    current.schedule = schedule_of(engine, *whole)
                    link = {"searched": "peer_bytes_per_ms", SWAPPING: "host_bytes_per_ms"}.get(engine)
                    with even_times(link=link) if link is not None else nullcontext():
                        found[name][engine] = carry_out(case, current.schedule)
                if engine == "measured":
                    counted = found[name][engine]["counted"]
                    held = torch.tensor([counted["peak_bytes"], UNDER_WAY * counted["largest_sent"]])
                    dist.all_reduce(held, dist.ReduceOp.MAX)
                    whole = held.tolist()
            dist.barrier()
    return found


def carry_out(case: Case, schedule: PipelineSchedule | None = None) -> dict[str, Any]:
    """All calls of a case: what each returned and did, and the weights in the end; or the error that ended it.

    The function called is Megatron's choice; `schedule` is what is behind it, where that is not Megatron's.
    """
    from megatron.core import pipeline_parallel
    from tiny_pipeline import Pipeline

    pipeline = Pipeline(case, ours=schedule is not None)
    calls: list[Any] = []
    with stages_made() as stages:
        for index, call in enumerate(case.calls):
            try:
                calls.append(pipeline.call(pipeline_parallel.get_forward_backward_func(), call, index))
            except (ValueError, RuntimeError) as error:
                calls.append({"error": f"{type(error).__name__}: {error}"})
                break
        left = len(stages)
    executor = None if schedule is None else schedule.executor
    counted = {} if executor is None else asdict(executor.counter)
    if schedule is not None:
        schedule.close()
    queues = None if executor is None else executor.connections.queues
    found = {"calls": calls, "weights": pipeline.weights(), "timers": pipeline.timers()}
    way = getattr(getattr(schedule, "loop", None), "_way", None)  # of the last batch
    found["layers"] = 0 if way is None else way.layers
    return {**found, "evicted": counted.get("evicted_bytes", 0), "counted": counted, "queues": queues, "left": left}


@contextmanager
def stages_made() -> Iterator[weakref.WeakSet[Any]]:
    """Those made inside and not let go of yet; inside, no garbage collector does it."""
    from evenpipe.megatron.stage import MegatronStage

    stages: weakref.WeakSet[Any] = weakref.WeakSet()
    make = MegatronStage.__init__

    def made(self: Any, *arguments: Any) -> None:
        make(self, *arguments)
        stages.add(self)

    MegatronStage.__init__ = made  # type: ignore[method-assign]
    gc.disable()
    try:
        yield stages
    finally:
        gc.enable()
        MegatronStage.__init__ = make  # type: ignore[method-assign]


def bindings() -> dict[str, list[str]]:
    """The names of what both bindings of `get_forward_backward_func` return, under the patch and after it."""
    from megatron.core import pipeline_parallel
    from megatron.core.pipeline_parallel import schedules

    def returned() -> list[str]:
        found = (pipeline_parallel.get_forward_backward_func(), schedules.get_forward_backward_func())
        return [getattr(function, "__name__", type(function).__name__) for function in found]

    with in_place_of_megatrons(schedule_of("1f1b")):
        inside = returned()
    return {"inside": inside, "outside": returned()}


@contextmanager
def laid_out(layout: Layout) -> Iterator[None]:
    """Megatron's parallel state for a layout."""
    from megatron.core import parallel_state

    virtual = layout.chunks if layout.chunks > 1 else None
    parallel_state.initialize_model_parallel(layout.tensor, layout.stages, virtual)
    yield
    parallel_state.destroy_model_parallel()


def work(rank: int, folder: Path, names: list[str], port: int) -> None:
    """One process."""
    import torch.distributed as dist

    from evenpipe.megatron.cpu_mode import cpu_mode
    from tests.gloo import share_device

    cpu_mode().apply()
    share_device()
    store = dist.TCPStore("localhost", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    found: dict[str, Any] = {"cases": {}, "bindings": {}}
    chosen = [(name, case) for name, case in CASES.items() if name in names]
    try:
        for layout, cases in groupby(chosen, key=lambda item: item[1].layout):
            with laid_out(layout):
                found["cases"] |= carry_out_all(dict(cases))
        for name, layout in BOUND.items():
            with laid_out(layout):
                found["bindings"][name] = bindings()
    except BaseException:
        found["failure"] = traceback.format_exc()
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    os._exit(0)


def main() -> None:
    """Fork, once everything is imported."""
    import torch
    import torch.multiprocessing as mp
    from torch.distributed import TCPStore

    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron asks for it where tensors are sharded
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # what counts the tokens of experts would be compiled, for a device
    import fused_kernel

    fused_kernel.install()
    import tiny_pipeline  # noqa: F401

    import evenpipe.megatron.schedule  # noqa: F401

    torch.set_num_threads(1)
    # For every case, process groups by the dozen, which meet faster here than in a file.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    arguments = (Path(sys.argv[1]), json.loads(sys.argv[2]), store.port)
    mp.start_processes(work, arguments, nprocs=WORLD, start_method="fork")


if __name__ == "__main__":
    main()
