"""``evenpipe plan``: what to run on a cluster: the fastest runs that fit, and why not others."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, ArgumentTypeError, Namespace, _ArgumentGroup
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, get_args

from evenpipe.cli.estimate import (
    AS_IN_PAPERS,
    AS_LOGGED,
    PRECISIONS,
    add_what_and_where,
    check_precisions,
    computed_in,
    framework_named,
    in_precision,
    known_names,
    model_and_cluster,
    notes_of,
    stages_on,
    words_of,
)
from evenpipe.cli.parser import STANDARD_OUTPUT, Commands, UsageError, add_command, add_schedule
from evenpipe.cli.progress import progress
from evenpipe.cli.shown import console_of, in_runs, print_prose, print_table
from evenpipe.cli.values import output_file, picture_file, positive, sample_count, write
from evenpipe.cli.verbosity import warn
from evenpipe.descriptions import Cluster, DescriptionError, Framework, Model, Precision
from evenpipe.fitting.deepspeed import ENGINE
from evenpipe.planner.arguments import Values
from evenpipe.planner.features import add_features, features_of, flags_of, of_megatron_s_schedules
from evenpipe.planner.run import ITERATIONS_WITH_LATE_GRADIENTS, Attention, Dispatcher, EstimateError, Run
from evenpipe.planner.search.plan import Plan, PlannedRun, brief, plan_of
from evenpipe.planner.search.question import Engine, Question, weighed
from evenpipe.planner.search.search import Found, search
from evenpipe.planner.uncertainty import Uncertainty
from evenpipe.recipes.recipe import FRAMEWORKS
from evenpipe.recipes.unsupported import NO_ADAPTERS
from evenpipe.report.figures import Front, Point, draw_front
from evenpipe.report.files import write_atomically
from evenpipe.schedule import ScheduleError, find, own
from evenpipe.settings.spelling import in_flags
from evenpipe.train.engines import ENGINES
from evenpipe.wording.nearest import nearest

__all__ = ["SEARCHED", "add_search_options", "add_to", "drawn", "engine_of", "question_from", "search_shown", "show"]

#: Frameworks whose stages all have as many layers (BPipe §4.2, L mod p = 0; PipeDream-2BW §3.3), and that divide no
#: sequence.
_OLDER: Final = ("megatron-v3", "pipedream-2bw")


def engine_of(framework: Framework) -> Engine:
    """Return what the framework offers: DeepSpeed its own, the others Megatron-LM's."""
    if framework.name == "deepspeed":
        return ENGINE
    older = framework.name in _OLDER
    return Engine("Megatron", ENGINES["evenpipe"].offers, uneven=not older, context=not older)


#: Options that fix something of the runs that are searched, as attributes.
SEARCHED = (
    *("schedule", "tensor_parallel", "context_parallel", "stages", "micro_batch_size", "precision", "attention"),
    *("gradients", "moe_dispatchers"),
)
_GRADIENTS: Final = ("fp32", "half")


def _schedules() -> str:
    """Return which schedules may be named, and which have to be, so as to be weighed."""
    run = [name for name in own() if "in_place" not in find(name).needs]  # whose iterations to a loss are not known
    named = [name for name in run if name not in weighed()]
    return f"{' | '.join(run)} (only where named: {', '.join(named)})"


def add_search_options(parser: ArgumentParser, title: str, description: str | None = None) -> _ArgumentGroup:
    """In a group of their own."""
    group = parser.add_argument_group(title, description)
    add_schedule(group, type=_names, metavar="NAME[,NAME...]", help=_schedules())
    group.add_argument("--no-bpipe", dest="bpipe", action="store_false", help="no run with BPipe")
    late = "also schedules whose gradients are a batch late (2bw), compared by the time to the same loss"
    group.add_argument("--delayed", action="store_true", help=late)
    group.add_argument("--tensor-parallel", "--tensor", type=positive, metavar="T")
    group.add_argument("--context-parallel", "--context", type=positive, metavar="C")
    group.add_argument("--stages", "--pipeline", type=positive, metavar="P")
    group.add_argument("--micro-batch-size", "--micro-batch", type=positive, metavar="B")
    several = "several are weighed beside each other; fp8: as --fp8-recipe says, or delayed"
    group.add_argument(
        "--precision", type=_Listed(PRECISIONS), metavar="NAME[,NAME...]", help=f"{' | '.join(PRECISIONS)}; {several}"
    )
    gradients = "fp32 | half (Megatron's --grad-reduce-in-bf16): sums of gradients to weigh beside each other"
    group.add_argument("--gradients", type=_Listed(_GRADIENTS), metavar="NAME[,NAME...]", help=gradients)
    dispatchers = f"{' | '.join(get_args(Dispatcher))}: experts' dispatchers to weigh beside each other"
    group.add_argument(
        "--moe-dispatchers", type=_Listed(get_args(Dispatcher)), metavar="NAME[,NAME...]", help=dispatchers
    )
    group.add_argument("--attention", choices=get_args(Attention))
    add_features(parser.add_argument_group("products, experts, graphs, optimizer, offloading", "as Megatron's flags"))
    return group


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ArgumentTypeError(f"{text!r}: give names, with a comma between two")
    return names


@dataclass(frozen=True)
class _Listed:
    """The type of an option that takes several of ``known`` names."""

    known: Sequence[str]

    def __call__(self, text: str) -> tuple[str, ...]:
        for name in _names(text):
            if name not in self.known:
                raise ArgumentTypeError(f"{name!r}: unknown, {nearest(name, self.known)}")
        return tuple(dict.fromkeys(_names(text)))


def _each_asked(arguments: Namespace, of: Model, nodes: Cluster) -> list[Run]:
    """Return a run for each precision, type of gradients and dispatcher that is named, with what else is asked for."""
    names: tuple[str, ...] = arguments.precision or ()
    check_precisions(arguments, names)
    plain = names[0] if len(names) == 1 and names[0] in get_args(Precision) else None
    precision, attention = computed_in(
        Namespace(framework=arguments.framework, precision=plain, attention=arguments.attention), nodes
    )
    asked = Run(global_batch=1, precision=precision, attention=attention, **features_of(Values(arguments)))
    found = [asked] if plain or not names else [in_precision(asked, name, arguments.fp8_recipe) for name in names]
    if arguments.moe_dispatchers and of.experts is None:
        raise UsageError(f"--moe-dispatchers: {of.name} has no experts: leave it out")
    if arguments.gradients and arguments.framework == "deepspeed":
        raise UsageError("--gradients: of Megatron only, as recipes set no grad_accum_dtype of DeepSpeed: leave it out")
    if "half" in (arguments.gradients or ()) and "fp32" in names:
        raise UsageError("--gradients half: not beside --precision fp32, whose gradients are fp32: leave one out")
    sums = [name == "fp32" for name in arguments.gradients or ()] or [asked.gradients_in_fp32]
    dispatchers = arguments.moe_dispatchers or (asked.dispatcher,)
    return [
        replace(one, gradients_in_fp32=in_fp32, dispatcher=dispatcher)
        for one, in_fp32, dispatcher in product(found, sums, dispatchers)
    ]


def question_from(arguments: Namespace, of: Model, nodes: Cluster) -> Question:
    """Return what the options ask of a search, for the framework that they name.

    Options without an effect are named on standard error. Raises UsageError, EstimateError for refused ones.
    """
    named = framework_named(arguments)
    schedules = arguments.schedule or weighed()
    for name in schedules:
        try:
            find(name)
        except ScheduleError as error:
            raise UsageError(f"--schedule {str(error).removeprefix('schedule=')}") from error
    asked, *further = every = _each_asked(arguments, of, nodes)
    if flag := of_megatron_s_schedules(asked):
        raise UsageError(f"{flag}: EvenPipe's schedules run without it: leave it out, or ask evenpipe estimate")
    narrowest = next((one for one in every if one.quantized not in (None, "nvfp4")), every[-1])
    for line in notes_of(arguments, of, replace(narrowest.of(named), recompute="selective"), searched=True):
        warn(line)
    return Question(
        of,
        nodes,
        arguments.global_batch_size,
        engine_of(named),
        schedules,
        named,
        asked,
        arguments.bpipe,
        arguments.delayed or bool(arguments.schedule),
        arguments.tensor_parallel,
        arguments.stages,
        arguments.micro_batch_size,
        arguments.context_parallel,
        tuple(further),
    )


_GIB: Final = 2**30


def show(plan: Plan, command: str) -> None:
    """Print the fastest runs, the ``command`` that says more of the first, and why others are not taken."""
    console = console_of()
    print_prose(
        console,
        f"{plan.model} on {plan.cluster} with {plan.framework}, at most {plan.global_batch_size} samples of "
        f"{plan.seq_length:,} tokens an iteration",
        "bold",
    )
    late = any(one.iterations_to_same_loss != 1 for one in plan.plans)
    heads = (
        *("", "t", "p", "d", "b", "schedule", "recompute"),
        "GiB",
        "bubble",
        "MFU",
        "TFLOP/s",
        "tokens/s",
        "samples/s",
    )
    caption = f"of a GPU: tokens/s, and TFLOP/s {AS_LOGGED}\nMFU {AS_IN_PAPERS}"
    rows = []
    for number, one in enumerate(plan.plans, 1):
        sizes = (one.tensor_parallel, one.stages, one.data_parallel, one.micro_batch_size)
        row = [
            number,
            *sizes,
            _schedule(one),
            "+".join(one.recompute_modules) or one.recompute,
            f"{one.memory_gib:.1f}",
            f"{one.bubble:.1%}",
            f"{one.mfu:.1%}",
            f"{one.logged_tflops_per_gpu:.1f}",
            f"{one.tokens_per_second_per_gpu:,.0f}",
        ]
        to_loss = one.samples_per_second / one.iterations_to_same_loss
        rows.append((*map(str, row), f"{one.samples_per_second:.2f}", *[f"{to_loss:.2f}"] * late))
    print_table(console, heads, rows, caption, optional=("bubble", "MFU", "TFLOP/s"))
    if late:
        print_prose(
            console,
            f"to the same loss: 2bw needs {ITERATIONS_WITH_LATE_GRADIENTS - 1:.0%} more iterations (PipeDream-2BW "
            "§5.1), which the order of plans counts",
        )
    print_prose(console, f"GiB of each stage, of {plan.device_gib:g} (×: so many stages in a row)", "bold")
    for number, one in enumerate(plan.plans, 1):
        print_prose(console, f"  {number}: {_memory(one)}")
        if one.each_stage[0].nodes:
            print_prose(console, f"     {stages_on([stage.nodes for stage in one.each_stage])}")
    best = plan.plans[0]
    if best.global_batch_size < plan.global_batch_size:
        print_prose(
            console, f"batch: {best.global_batch_size} samples, the most that {best.data_parallel} replicas share alike"
        )
    sure = Uncertainty(**best.uncertainty)  # type: ignore[arg-type]
    print_prose(console, f"an iteration takes {best.iteration_ms:,.0f} ms ({sure}: {sure.meaning})")
    console.print(f"{command} {best.flags}", soft_wrap=True)
    for line in best.warnings:
        print_prose(console, line)
    console.print("not taken", style="bold")
    for one_rejected in plan.rejected:
        print_prose(console, f"  {one_rejected.family}: {one_rejected.reason}")
    runs = plan.runs
    print_prose(
        console,
        f"{runs['weighed']:,} runs: {runs['too_large']:,} do not fit, {runs['slower']:,} are slower by their bounds, "
        f"{runs['simulated']:,} simulated",
        "dim",
    )


def _schedule(one: PlannedRun) -> str:
    words = [one.schedule] + [f"v={one.chunks}"] * (one.chunks > 1) + [f"k={one.group_size}"] * (one.group_size > 1)
    words += [f"c={one.context_parallel}"] * (one.context_parallel > 1)
    apart = one.expert_tensor_parallel != one.tensor_parallel
    words += [f"e={one.expert_parallel}"] * (one.expert_parallel > 1) + [f"et={one.expert_tensor_parallel}"] * apart
    words += ["BPipe"] * one.bpipe + [one.quantized or ""] * bool(one.quantized)
    words += [one.dispatcher] * (one.dispatcher != "alltoall")
    words += ["uneven"] * (one.layout is not None) + ["further token apart"] * (one.further_part is not None)
    return " ".join(words + ["pipeline in one node"] * (one.placement == "pipeline"))


def _memory(one: PlannedRun) -> str:
    return in_runs(f"{stage.bytes['total'] / _GIB:.1f}" for stage in one.each_stage)


def drawn(plan: Plan, question: Question, found: Found) -> Front:
    """Return the front, the fastest runs, and the best of each family that fits."""
    front = [Point(one.most_bytes / _GIB, one.estimate.samples_per_second, brief(one)) for one in found.front]
    others: Sequence[Point] = [
        Point(one.most_bytes / _GIB, one.estimate.samples_per_second, family.value)
        for family, one in found.best.items()
        if family.kind == "schedule"
    ]
    title = f"{plan.model} on {plan.cluster}, at most {plan.global_batch_size} samples an iteration"
    return Front(title, question.cluster.device.memory_gib, front, others)


def add_to(commands: Commands) -> None:
    """Add the sub-command."""
    document = (
        "--json prints a document evenpipe.plan/1: plans, the fastest first, the Pareto front of memory against speed, "
        "and why families of runs are rejected. "
        f"{known_names()}"
    )
    parser = add_command(commands, "plan", epilog=document)
    group = add_what_and_where(parser)
    group.add_argument(
        *("--global-batch-size", "--global-batch"),
        type=sample_count,
        required=True,
        metavar="G",
        help="samples of an iteration; where replicas do not divide them, as many as do: never more",
    )
    add_search_options(parser, "what it may choose of", "all that the framework runs, where nothing is said")
    group = parser.add_argument_group("output")
    group.add_argument("--top", type=positive, default=5, metavar="N", help="how many runs to show (default 5)")
    group.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    group.add_argument("--out", type=output_file, metavar="PLAN.json", help="write the document")
    group.add_argument(
        "--picture", type=picture_file, metavar="P.png", help="draw memory against speed, and the front, as a PNG"
    )
    parser.set_defaults(run=_run)


def _run(arguments: Namespace) -> None:
    try:
        question = _question(arguments)
        with_front = bool(arguments.json or arguments.out or arguments.picture)  # the text has none
        found = search_shown("plan", question, arguments.top, with_front)
    except DescriptionError as error:
        raise UsageError(str(error)) from error
    except EstimateError as error:
        raise UsageError(in_flags(error)) from error
    plan = plan_of(question, found)
    estimate = f"evenpipe estimate {shlex.join(words_of(arguments))}"
    last = _recipe_of(arguments, question, plan.plans[0])
    of_best = (f"{estimate} {plan.plans[0].flags}", *[last] * last.startswith("evenpipe "))
    plan = plan.model_copy(update={"commands": of_best})
    document = plan.model_dump_json()
    write("--out", arguments.out, lambda path: write_atomically(path, document + "\n"))
    write("--picture", arguments.picture, lambda path: draw_front(path, drawn(plan, question, found)))
    if arguments.json:
        print(document)
    else:
        show(plan, estimate)
        if len(of_best) > 1 and arguments.out not in (None, STANDARD_OUTPUT):
            last = shlex.join(["evenpipe", "recipe", "--plan", str(arguments.out), "--out", "DIR"])
        print(last) if last.startswith("evenpipe ") else print_prose(console_of(), last)


def search_shown(command: str, question: Question, top: int, with_front: bool = False) -> Found:
    """Return what a search finds, with its progress on a terminal.

    No time left is shown: runs that wait take a simulation each or none at all, and nobody knows which before.
    """
    with progress(command, "weighs runs") as show_progress:

        def told(simulated: int, left: int) -> None:
            show_progress(f"{simulated:,} runs simulated, {left:,} to weigh")

        return search(question, top, told, with_front)


def _recipe_of(arguments: Namespace, question: Question, best: PlannedRun) -> str:
    """Return the command that writes ``best`` as files; of what no recipe starts, why there is none."""
    if arguments.framework not in FRAMEWORKS:
        return f"no recipe starts {arguments.framework}: plan for {' or '.join(FRAMEWORKS)} to write files"
    if arguments.framework == "deepspeed" and (best.tensor_parallel * best.context_parallel > 1 or best.stages == 1):
        return "no recipe starts one stage or divided tensors in DeepSpeed: plan with --tensor-parallel 1 --stages P"
    if question.asked.lora_rank:
        return f"no recipe starts it: {NO_ADAPTERS}"
    kind = "gpt" if question.model.causal else "bert"
    words = ["evenpipe", "recipe", kind, *words_of(arguments)]
    words += ["--global-batch-size", str(arguments.global_batch_size)]
    for name in SEARCHED:
        given = getattr(arguments, name)
        text = ",".join(given) if isinstance(given, tuple) else str(given)
        words += [f"--{name.replace('_', '-')}", text] if given is not None else []
    words += [word for flag in flags_of(replace(question.asked, recompute="selective")) for word in flag]
    words += ["--no-bpipe"] * (not arguments.bpipe) + ["--delayed"] * arguments.delayed
    one_by_one = "deepspeed" if arguments.framework == "deepspeed" else "torchrun"
    launcher = one_by_one if question.cluster.groups else "slurm" if question.cluster.nodes > 1 else "torchrun"
    return shlex.join([*words, "--launcher", launcher, "--out", "DIR"])


def _question(arguments: Namespace) -> Question:
    of, nodes = model_and_cluster(arguments)
    return question_from(arguments, of, nodes)
