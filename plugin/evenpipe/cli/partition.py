"""``evenpipe partition``: where to cut a model into stages, and what to swap or recompute, for a memory limit."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from evenpipe.cli.parser import Commands, Parser, UsageError, add_command, add_schedule
from evenpipe.cli.partition_shown import print_check, print_front, print_plan, ways_to_cut
from evenpipe.cli.progress import progress
from evenpipe.cli.shown import console_of, print_prose, print_table
from evenpipe.cli.values import bandwidth_gbps, gibibytes, output_file, picture_file, positive, whole, write
from evenpipe.descriptions import Cluster, DescriptionError, device, equal_nodes, names
from evenpipe.partition.configurations import MODELS
from evenpipe.partition.dawnpiper.copies import PIPEDREAM, Workload
from evenpipe.partition.dawnpiper.problem import PartitionError, Problem
from evenpipe.partition.profile import Profile
from evenpipe.partition.search.finding import can_fit, find_plan, largest_batch
from evenpipe.partition.search.plan import Plan
from evenpipe.report.figures import Division, draw_divisions
from evenpipe.report.files import is_special, write_atomically
from evenpipe.schedule import ScheduleError, find
from evenpipe.settings.spelling import in_flags
from evenpipe.upstream.installed import has_module

if TYPE_CHECKING:
    from evenpipe.cli.partition_sources import Source
    from evenpipe.layouts.plan import LayoutPlan, Split

__all__ = ["add_to", "show_layout"]

_GIB: Final = 2**30


def show_layout(arguments: Namespace) -> int:
    """Print it, and write what is asked for; 1 where a layout that is checked is no good.

    UsageError for flags that there is no layout for.
    """
    if not has_module("megatron.core"):
        raise UsageError("megatron-core is not installed: pip install 'evenpipe[megatron]'")
    if not arguments.flags:
        raise UsageError(
            "--megatron: which flags? Give those of the run after --: evenpipe partition --megatron -- ..."
        )
    try:
        where = None if arguments.cluster is None else equal_nodes(arguments.cluster)
    except DescriptionError as error:
        raise UsageError(f"--cluster {error}") from error
    if where is not None and arguments.device is not None:
        raise UsageError(f"--device {arguments.device}: --cluster {where.name} says which: leave one of them out")
    if arguments.check is not None:
        return _check(arguments, where)
    # These bring torch, which bad input need not wait for.
    from evenpipe.layouts.gpt import LayoutError
    from evenpipe.layouts.plan import best_layout

    limit_bytes = None if arguments.memory_gib is None else int(arguments.memory_gib * _GIB)
    if arguments.optimize == "swap+recompute":
        raise UsageError(
            "--optimize swap+recompute: Megatron's stages compute layers again, and swap nothing: recompute"
        )
    if arguments.optimize == "recompute" and limit_bytes is None:
        raise UsageError("--optimize recompute: as far as it takes to fit into what? Give --memory-gib")
    measured = where is None and arguments.device in (None, "cpu")
    with progress("partition", "timing layers" if measured else "reading flags"):
        try:
            found, profile = best_layout(
                arguments.flags,
                None if measured else device(arguments.device) if where is None else where.device,
                world_size=arguments.world_size if where is None else where.gpus,
                limit_bytes=limit_bytes,
                half_layers=arguments.half_layers,
                recompute=arguments.optimize == "recompute",
            )
        except (LayoutError, DescriptionError) as error:
            raise UsageError(str(error)) from error
    document = json.dumps(found.to_json())
    write("--out", arguments.out, lambda path: write_atomically(path, document))
    write("--profile-out", arguments.profile_out, profile.write)
    stages = {"even": found.even, "chosen": found.best}
    write(
        "--picture",
        arguments.picture,
        lambda path: draw_divisions(path, found.layout, [_division(*one) for one in stages.items()]),
    )
    if arguments.json:
        print(document)
        return 0
    console = console_of()
    console.print(_flag(found, arguments.out), style="bold", soft_wrap=True)
    _print(console, found)
    return 0


def _check(arguments: Namespace, where: Cluster | None) -> int:
    from evenpipe.layouts.given import check_layout
    from evenpipe.layouts.gpt import LayoutError

    if where is None:
        raise UsageError("--check: on which GPUs? Name all of the run's with --cluster, such as 8x8-h100")
    try:
        found = check_layout(arguments.flags, arguments.check, where)
    except (LayoutError, DescriptionError) as error:
        raise UsageError(str(error)) from error
    if arguments.json:
        print(json.dumps(found.to_json()))
    else:
        print_check(console_of(), found)
    return 1 if found.problem else 0


def _flag(found: LayoutPlan, out: Path | None) -> str:
    """Return the flags for the run. Megatron's own cut whole layers only, and recompute as many on every stage."""
    path = "P.json, which --out P.json writes" if out is None else str(out)
    if found.best.halves:
        layers = ", ".join(map(str, found.best.cut_layers))
        return f"--evenpipe-partition {path} ('{found.layout}', cut between attention and MLP of layer {layers})"
    if any(stage.recompute_layers for stage in found.stages):
        again = ", ".join(str(stage.recompute_layers) for stage in found.stages)
        return f"--evenpipe-partition {path} ('{found.layout}', layers computed again by stage: {again})"
    return f"--pipeline-model-parallel-layout '{found.layout}'"


def _print(console: Console, found: LayoutPlan) -> None:
    """Print a row for each stage: the layout, and the even split."""
    proven = "no other is faster" if found.proven else "the best that was found"
    caption = (
        f"slowest {found.best.max_stage_ms:,.4g} ms, {proven}; even split {found.even.max_stage_ms:,.4g} ms; "
        f"times: {found.source}"
    )
    rows = []
    for number, pair in enumerate(zip(found.best.stages, found.even.stages, strict=True)):
        cells = (
            (", ".join(one.layers), f"{one.forward_ms + one.backward_ms:,.4g}", f"{one.peak_bytes / _GIB:.4g}")
            for one in pair
        )
        rows.append((str(number), *(cell for row in cells for cell in row)))
    print_table(console, ("stage", "layers", "ms", "peak GiB", "even split", "ms", "peak GiB"), rows, caption)


def _division(title: str, split: Split) -> Division:
    """Return a layout as the picture shows it: it saves no memory by recomputation or swapping."""
    peaks = [stage.peak_bytes for stage in split.stages]
    forward_ms, backward_ms = (
        [getattr(stage, time) for stage in split.stages] for time in ("forward_ms", "backward_ms")
    )
    return Division(title, forward_ms, backward_ms, [0.0] * len(peaks), peaks, peaks)


_OUT: Final = (
    "write the plan, and beside it the code of every stage, P.stage0.py and so on (not with --profile, which has no "
    "operations to write)"
)


def add_to(commands: Commands) -> None:
    """Add the sub-command."""
    document = (
        "--json prints a document evenpipe.partition/1: cuts (the last node of each stage but the last), and of each "
        "stage its nodes, times, peak memory, and what it recomputes and swaps; what each cut sends (crossings), a "
        "batch by the simulator (batch_ms, layers_batch_ms with layer cuts); with --max-batch, max_batch too. "
        "With --megatron, evenpipe.layout/1: the best --pipeline-model-parallel-layout."
    )
    usage = (
        "evenpipe partition --model NAME|--module FILE.py:FUNCTION|--hf PATH"
        "\n                          --stages N [OPTIONS]"
        "\n       evenpipe partition --profile F.json --stages N [OPTIONS]"
        "\n       evenpipe partition --megatron [OPTIONS] -- [pretrain_gpt.py] FLAGS ..."
        "\n       evenpipe partition --megatron --check LAYOUT --cluster NAME -- FLAGS ..."
    )
    beyond = "Megatron's go after --, with --megatron"
    parser = add_command(commands, "partition", usage=usage, epilog=document, beyond=beyond)
    _add_model(parser)
    _add_pipeline(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    group.add_argument("--out", type=output_file, metavar="P.json", help=_OUT)
    group.add_argument("--profile-out", type=output_file, metavar="F.json", help="write the profile")
    group.add_argument(
        "--picture", type=picture_file, metavar="P.png", help="draw time and memory of every stage, cut in four ways"
    )
    parser.set_defaults(run=_run)


def _add_model(parser: Parser) -> None:
    group = parser.add_argument_group("model", "one of the first four, or a profile that was written before")
    one = group.add_mutually_exclusive_group()
    about = f"{' | '.join(MODELS)}: a model of DawnPiper's evaluation, full size"
    one.add_argument("--model", choices=MODELS, metavar="NAME", help=about)
    one.add_argument("--module", metavar="FILE.py:FUNCTION", help="a function that returns (model, inputs)")
    one.add_argument("--hf", type=Path, metavar="CONFIG.json", help="a configuration of Hugging Face's")
    one.add_argument(
        "--megatron", action="store_true", help="a GPT of Megatron's, by the flags of its run: gives the layout for it"
    )
    group.add_argument(
        "--half-layers", action="store_true", help="with --megatron: stages may end between attention and MLP"
    )
    group.add_argument(
        "--check",
        metavar="LAYOUT",
        help="with --megatron: does this --pipeline-model-parallel-layout fit --cluster, and how far is it from the "
        "best? Status 1 where it does not fit, or takes 2%% longer",
    )
    group.add_argument("--world-size", type=positive, metavar="N", help="with --megatron: GPUs of the run (--cluster)")
    parser.add_argument(
        "flags",
        nargs="*",
        metavar="-- FLAGS",
        help="with --megatron: pretrain_gpt.py, if there is a checkout, and flags",
    )
    group.add_argument("--profile", type=Path, metavar="F.json", help="read the profile in place of making it")
    group.add_argument("--micro-batch-size", type=positive, metavar="B", help="samples (default 1, or --module's)")
    group.add_argument("--sequence-length", type=positive, default=512, metavar="S", help="tokens (default 512)")
    group.add_argument("--precision", choices=("fp32", "bf16", "fp16"), help="default fp32")
    group.add_argument("--small", action="store_true", help="a few narrow layers of --model, of the same structure")
    group.add_argument(
        "--attention",
        choices=("eager", "sdpa"),
        help="default: transformers' own with --hf, eager with --model, as the paper",
    )
    group.add_argument(
        "--device",
        metavar="NAME",
        help=f"{' | '.join(names('devices'))}, or a YAML file: times by its roofline; cpu | cuda: measured here "
        "(default a100-40gb)",
    )


def _add_pipeline(parser: Parser) -> None:
    group = parser.add_argument_group("pipeline")
    group.add_argument("--stages", type=whole, metavar="N", help="pipeline stages")
    group.add_argument("--memory-gib", type=gibibytes, metavar="X", help="of each stage (default: the device's)")
    one = group.add_mutually_exclusive_group()
    add_schedule(one, metavar="NAME", help="what it is to run under; pipedream too (default 1f1b)")
    one.add_argument(
        "--mode", choices=("sync", "async"), help="as DawnPiper: gpipe with a micro-batch a stage, or pipedream"
    )
    group.add_argument("--micro-batches", type=positive, metavar="M", help="in a batch (default: as many as stages)")
    group.add_argument("--chunks", type=positive, default=1, metavar="V", help="model chunks a stage (default 1)")
    group.add_argument("--group-size", type=positive, default=1, metavar="K", help="micro-batches in a row (default 1)")
    group.add_argument("--bpipe", action="store_true", help="with activations evicted to partner stages")
    group.add_argument(
        "--cluster",
        metavar="NAME",
        help="NODESxGPUS-NAME, or PATH.yaml[:NAME][@NODESxGPUS], with a stage on each GPU: links between stages "
        "(default: the device's link to others of its node; of cpu and cuda: 25 GB/s)",
    )
    group.add_argument("--stage-gbps", type=bandwidth_gbps, metavar="X", help="of the links between stages, one way")
    group.add_argument(
        "--host-gbps",
        "--link-gbps",
        type=bandwidth_gbps,
        metavar="X",
        help="of a stage's link to its host (default: the device's; --link-gbps is its older name)",
    )
    group.add_argument(
        "--optimize",
        choices=("none", "recompute", "swap+recompute"),
        default="none",
        help="how stages may save memory (default none)",
    )
    group.add_argument("--max-batch", action="store_true", help="find the largest micro-batch that fits")


def _run(arguments: Namespace) -> int:
    if arguments.megatron:
        return show_layout(arguments)
    for option in ("check", "world_size"):
        if getattr(arguments, option) is not None:
            raise UsageError(f"--{option.replace('_', '-')}: is for --megatron: leave it out")
    if arguments.half_layers:
        raise UsageError("--half-layers: is for --megatron: other models are cut at any node")
    if arguments.flags:
        raise UsageError(f"{arguments.flags[0]}: flags are for --megatron: leave them out")
    if arguments.stages is None:
        raise UsageError("--stages: how many? Give at least 2")
    if arguments.out is not None and arguments.profile is None and is_special(arguments.out):
        raise UsageError(
            f"--out {arguments.out}: is no regular file, and the code of every stage goes beside the plan: name a "
            "file, or give --json for the plan alone"
        )
    workload = _workload(arguments)
    try:
        if workload.schedule != PIPEDREAM:
            find(workload.schedule)
    except ScheduleError as error:
        raise UsageError(in_flags(error)) from error
    from evenpipe.cli.partition_sources import Source  # it brings torch, which bad input need not wait for

    source = Source(arguments)
    limit_bytes = int(source.memory_gib * _GIB)
    options = (workload, arguments.stages, limit_bytes, arguments.optimize, source.host_gbps)
    try:
        if arguments.max_batch:
            profile = source.at(_largest(source, lambda profile: can_fit(Problem.of(profile, *options))))
        else:
            profile = source.profile()
        plan = find_plan(profile, *options, links=source.links)
    except (PartitionError, ScheduleError) as error:
        raise UsageError(in_flags(error)) from error
    _write(arguments, source, profile, plan)
    for warning in plan.warnings:
        print_prose(console_of(stderr=True), f"warning: {warning}", "yellow")
    if arguments.json:
        batch = {"max_batch": plan.origin.micro_batch_size} if arguments.max_batch else {}
        print(json.dumps(plan.model_dump(mode="json") | batch))
        return 0
    console = console_of()
    print_prose(console, _title(plan), "bold")
    print_plan(console, plan)
    if plan.front:
        print_front(console, plan)
    return 0


def _largest(source: Source, fits: Callable[[Profile], bool]) -> int:
    found = largest_batch(source.at, fits)
    if not found:
        raise UsageError(
            f"--memory-gib {source.memory_gib:g}: not even micro-batches of one sample fit: "
            "give more memory, more stages, or --optimize swap+recompute"
        )
    return found


def _workload(arguments: Namespace) -> Workload:
    if arguments.mode is not None:
        return Workload.of_mode(arguments.mode, arguments.stages)
    return Workload(
        arguments.schedule or "1f1b",
        arguments.micro_batches or arguments.stages,
        arguments.chunks,
        arguments.group_size,
        arguments.bpipe,
    )


def _write(arguments: Namespace, source: Source, profile: Profile, plan: Plan) -> None:
    write("--profile-out", arguments.profile_out, profile.write)
    write("--out", arguments.out, lambda path: source.write_plan(path, profile, plan))
    write(
        "--picture",
        arguments.picture,
        lambda path: draw_divisions(path, _title(plan), ways_to_cut(profile, plan), plan.limit_bytes / _GIB),
    )


def _title(plan: Plan) -> str:
    origin, stages = plan.origin, plan.stage_count
    bpipe = " with BPipe" if plan.bpipe else ""
    return (
        f"{origin.model}, {stages} stages, {plan.schedule}{bpipe}, m={plan.micro_batches}, "
        f"b={origin.micro_batch_size}, {plan.limit_bytes / _GIB:.4g} GiB, {origin.device} ({origin.source})"
    )
