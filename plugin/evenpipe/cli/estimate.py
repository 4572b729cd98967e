"""``evenpipe estimate``: what a run will need and how fast it will be, before a GPU is paid for."""

from __future__ import annotations

import argparse
import json
from argparse import ArgumentParser, BooleanOptionalAction, Namespace, _ArgumentGroup
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final, get_args

from evenpipe.cli.parser import Commands, UsageError, add_command, add_schedule
from evenpipe.cli.shown import console_of, print_prose, print_table
from evenpipe.cli.values import duration_ms, positive, sample_count
from evenpipe.descriptions import (
    Cluster,
    DescriptionError,
    Framework,
    Model,
    Precision,
    cluster,
    configured,
    framework,
    model,
    model_types,
    names,
)
from evenpipe.planner.arguments import Values
from evenpipe.planner.estimate import Estimate, Estimator
from evenpipe.planner.features import add_features, features_of
from evenpipe.planner.quantized import Quantized
from evenpipe.planner.run import Attention, EstimateError, Placement, Recompute, Run
from evenpipe.planner.search.balanced_layout import Layout
from evenpipe.recipes.flag_needs import Given, without_effect
from evenpipe.settings.spelling import in_flags

__all__ = [
    "AS_IN_PAPERS",
    "AS_LOGGED",
    "PRECISIONS",
    "add_model",
    "add_to",
    "add_what_and_where",
    "check_precisions",
    "computed_in",
    "framework_named",
    "in_precision",
    "known_names",
    "model_and_cluster",
    "notes_of",
    "show",
    "stages_on",
    "words_of",
]


#: What products may be computed in; those in 8 and 4 bits are beside bf16.
PRECISIONS: Final = (*get_args(Precision), "fp8", *get_args(Quantized))


def add_model(group: _ArgumentGroup, required: bool) -> None:
    """Add the options that say which model."""
    one = group.add_mutually_exclusive_group(required=required)
    one.add_argument("--model", metavar="NAME", help="a name, or PATH.yaml[:NAME]")
    one.add_argument("--hf", type=Path, metavar="PATH", help="a config.json of Hugging Face's, or a folder with one")
    group.add_argument(
        "--seq-length", type=positive, metavar="N", help="tokens of a sequence (default: the model's, or 4,096)"
    )


def add_what_and_where(parser: ArgumentParser) -> _ArgumentGroup:
    """Return the options that `evenpipe estimate` and `evenpipe plan` both begin with."""
    group = parser.add_argument_group("what and where")
    add_model(group, required=True)
    group.add_argument(
        "--cluster", required=True, metavar="NAME", help="NODESxGPUS-NAME, or PATH.yaml[:NAME][@NODESxGPUS]"
    )
    group.add_argument(
        "--framework",
        default="megatron",
        metavar="NAME",
        help=f"{' | '.join(names('frameworks'))} (default: megatron, today's; megatron-v3, pipedream-2bw: the papers')",
    )
    return group


def model_and_cluster(arguments: Namespace) -> tuple[Model, Cluster]:
    """Return the model and the cluster that are named. Raises UsageError."""
    return _model(arguments), _named("--cluster", cluster, arguments.cluster)


def _model(arguments: Namespace) -> Model:
    tokens: int | None = arguments.seq_length
    if arguments.hf is not None:
        return _named("--hf", lambda path: configured(path, tokens), arguments.hf)  # type: ignore[no-any-return]
    found: Model = _named("--model", model, arguments.model)
    return found if tokens is None else found.of_sequence(tokens)


def words_of(arguments: Namespace) -> list[str]:
    """Return the words of a command that name the same model, cluster and framework."""
    given = {name: getattr(arguments, name) for name in ("model", "hf", "seq_length", "cluster", "framework")}
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in given.items() if value is not None]
    return [word for pair in pairs for word in pair]


def framework_named(arguments: Namespace) -> Framework:
    """Return the framework that is named. Raises UsageError."""
    return _named("--framework", framework, arguments.framework)  # type: ignore[no-any-return]


def computed_in(arguments: Namespace, nodes: Cluster) -> tuple[Precision | None, Attention | None]:
    """Return the precision and the attention that are asked for; None is the framework's.

    A GPU that computes no bf16 is older than Ampere, on which FlashAttention 2 does not run: there, without a word,
    fp16 and in Megatron unfused attention.
    """
    if all("bf16" in kind.device.tflops for kind in nodes.kinds):
        return arguments.precision, arguments.attention
    unfused: Attention | None = None if arguments.framework == "deepspeed" else "unfused"
    return arguments.precision or "fp16", arguments.attention or unfused


def check_precisions(arguments: Namespace, names: Sequence[str]) -> None:
    """Raise UsageError where a flag of 8 or 4 bits asks for other products than every one of these precisions."""
    if not names or set(names) & {"fp8", *get_args(Precision)}:
        return
    four_bits = "nvfp4" in names
    for option, agrees in (
        ("fp8_recipe", arguments.fp8_recipe in names),
        ("fp8_format", set(names) != {"nvfp4"}),
        ("fp4_format", four_bits),
        ("fp4_recipe", four_bits),
    ):
        if (value := getattr(arguments, option)) is not None and not agrees:
            flag = f"--{option.replace('_', '-')} {value}"
            raise UsageError(f"{flag}: contradicts --precision {','.join(names)}: leave one of them out")


def in_precision(asked: Run, name: str, recipe: str | None) -> Run:
    """Return the run with products in that precision; those in 8 and 4 bits are beside bf16."""
    if name in get_args(Precision):
        plain = {"quantized": None, "quantized_parameters": False, "quantized_attention": False}
        return replace(asked, precision=name, **plain)  # type: ignore[arg-type]
    quantized = recipe or "delayed" if name == "fp8" else name
    narrow = {"quantized_attention": False, "quantized_parameters": False} if quantized == "nvfp4" else {}
    return replace(asked, precision="bf16", quantized=quantized, **narrow)  # type: ignore[arg-type]


def _named(option: str, find: Callable[[Any], Any], name: Any) -> Any:
    try:
        return find(name)
    except DescriptionError as error:
        raise UsageError(f"{option} {error}") from error


def known_names() -> str:
    """For the end of a command's help."""
    return (
        f"Models: {', '.join(names('models'))}. Clusters: {', '.join(names('clusters'))}; with a size: 4x8-a100-80gb. "
        f"--hf reads a model_type of {', '.join(model_types())}."
    )


AS_LOGGED: Final = "as Megatron-LM logs it (attention halved)"
AS_IN_PAPERS: Final = "as papers count it (Korthikanti et al. 2022, not halved)"
_GIB: Final = 2**30


def show(
    shown: Estimate, of: Model, nodes: Cluster, as_json: bool, spelt: Callable[[str], str] = str, *notes: str
) -> None:
    """Print it. ``spelt`` writes the flags in its lines as whoever asks knows them; ``notes`` come before warnings."""
    document = shown.to_json()
    document["reason"] = None if shown.reason is None else spelt(shown.reason)
    document["warnings"] = [*notes, *map(spelt, shown.warnings)]
    if as_json:
        print(json.dumps(document))
        return
    _print(shown, of, nodes, [*([document["reason"]] if shown.reason else []), *document["warnings"]])


def _print(shown: Estimate, of: Model, nodes: Cluster, lines: list[str]) -> None:
    console = console_of()
    run = shown.run
    more = {"context": run.context, "experts": run.expert, "model chunks": run.chunks}
    further = "".join(f"{name} {size}, " for name, size in more.items() if size > 1)
    divided = f"tensor {run.tensor}, {run.stages} stages, data {run.data}, {further}micro-batches of {run.micro_batch}"
    title = (
        f"{of.name} on {nodes.name}: {of.sequence:,} tokens a sample, {divided}, {run.schedule}"
        f"{' with BPipe' if run.bpipe else ''}, recompute {run.recomputing}"
    )
    print_prose(console, title, "bold")
    parts = ("weights", "grads", "optim", "saved", "buffers", "comm")
    sizes = " or ".join(dict.fromkeys(f"{kind.device.memory_gib:g}" for kind in nodes.kinds))
    caption = (
        f"GiB, of {sizes}; milliseconds of a micro-batch; waits: the rest of an iteration, for "
        "other stages, replicas and the step"
    )
    rows = []
    for number, stage in enumerate(shown.stages):
        held = [f"{nbytes / _GIB:.2f}" for nbytes in (*stage.bytes, stage.bytes.total)]
        computes = run.micro_batches * (stage.forward_ms + stage.backward_ms) / shown.iteration_ms
        times = f"{stage.forward_ms:.4g}", f"{stage.backward_ms:.4g}", f"{max(0.0, 1 - computes):.0%}"
        rows.append((str(number), *held, *times))
    print_table(console, ("stage", *parts, "total", "forward", "backward", "waits"), rows, caption, optional=parts)
    if nodes.groups:
        print_prose(console, stages_on([stage.nodes for stage in shown.stages]))
    sure = shown.uncertainty
    print_prose(
        console,
        f"{'fits' if shown.fits else 'does not fit'}; iteration {shown.iteration_ms:,.0f} ms ({sure}: "
        f"{sure.meaning}), {shown.samples_per_second:.2f} samples/s, {shown.tokens_per_second:,.0f} tokens/s/GPU",
    )
    rates = (f"{shown.logged_tflops:.1f} TFLOP/s/GPU {AS_LOGGED}", f"MFU {shown.mfu:.1%} {AS_IN_PAPERS}")
    unknown = (f"{run.schedule}: {UNKNOWN_ITERATIONS}",) if "in_place" in run.spec.needs else ()
    for line in (*rates, *unknown, *lines):
        print_prose(console, line)


def stages_on(nodes: Sequence[str]) -> str:
    """Return which stages are on which nodes, in words; ``nodes``: of each stage."""
    found = []
    for name, stages in groupby(range(len(nodes)), key=lambda stage: nodes[stage]):
        first, *rest = stages
        found.append(f"stage{f's {first}-{rest[-1]}' if rest else f' {first}'} on {name}")
    return "; ".join(found)


#: What an estimate leaves out where each stage steps by itself (docs/2bw.md, PACI).
UNKNOWN_ITERATIONS: Final = "one weight version; how many more iterations it needs to the same loss is unknown"
#: BPipe's words for what is recomputed.
_RECOMPUTE: Final[dict[str, Recompute]] = {
    **{scope: scope for scope in get_args(Recompute)},
    "attention": "selective",
    "layer": "full",
}


def add_to(commands: Commands) -> None:
    """Add the sub-command."""
    document = (
        "--json prints a document evenpipe.estimate/1: fits, the reason if it does not, mfu (a fraction, as "
        "papers count it), logged_tflops_per_gpu (as Megatron-LM logs it), iteration_ms, samples_per_second, "
        "tokens_per_second_per_gpu, uncertainty (of iteration_ms), per stage bytes, forward_ms and "
        "backward_ms (of a micro-batch), and warnings. "
        f"{known_names()}"
    )
    parser = add_command(commands, "estimate", epilog=document)
    add_what_and_where(parser)
    group = parser.add_argument_group("how it is divided")
    group.add_argument("--tensor-parallel", "--tensor", type=positive, default=1, metavar="T")
    group.add_argument("--stages", "--pipeline", type=positive, default=1, metavar="P", help="pipeline stages")
    group.add_argument("--data-parallel", "--data", type=positive, metavar="D", help="default: what fills the cluster")
    group.add_argument("--context-parallel", "--context", type=positive, default=1, metavar="C")
    group.add_argument("--expert-parallel", "--expert", type=positive, default=1, metavar="E")
    group.add_argument(
        "--expert-tensor-parallel", "--expert-tensor", type=positive, metavar="T", help="default: tensor"
    )
    group.add_argument("--chunks", type=positive, default=1, metavar="V", help="model chunks a stage")
    group.add_argument(
        "--layout",
        type=_layout,
        metavar="N,N,..",
        help="layers of each part, in the model's order; 0m: that part predicts further tokens, not the last",
    )
    group.add_argument("--micro-batch-size", "--micro-batch", type=positive, default=1, metavar="B")
    group.add_argument("--global-batch-size", "--global-batch", type=sample_count, required=True, metavar="G")
    group = parser.add_argument_group("how it is run")
    add_schedule(group, default="1f1b", metavar="NAME")
    group.add_argument("--group-size", type=positive, default=1, metavar="K", help="micro-batches in a row, of kfkb")
    group.add_argument("--bpipe", action="store_true", help="level the stages' memory by evicting to partner stages")
    group.add_argument("--synchronous-transfers", action="store_true", help="evictors wait for evictions and loads")
    group.add_argument(
        "--placement",
        choices=get_args(Placement),
        default="replicas",
        help="what is in one node, if one of them can be: replicas of a stage (Megatron's), or a pipeline's stages",
    )
    group.add_argument("--message-ms", type=duration_ms, metavar="T", help="measured: a message between neighbours")
    group.add_argument(
        "--recompute", choices=_RECOMPUTE, default="none", help="none | selective = attention | full = layer"
    )
    group = parser.add_argument_group("what the framework does", "its own defaults where nothing is said")
    group.add_argument("--precision", choices=PRECISIONS, metavar="NAME", help=" | ".join(PRECISIONS))
    group.add_argument("--attention", choices=get_args(Attention))
    for option, said in _SWITCHES.items():
        group.add_argument(f"--{option}", action=BooleanOptionalAction, default=None, help=said)
    add_features(parser.add_argument_group("products, experts, graphs, optimizer, offloading", "as Megatron's flags"))
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.set_defaults(run=_run)


_SWITCHES: Final = {
    "sequence-parallel": "norms and dropout divided among tensor-parallel ranks",
    "sharded-optimizer": "ZeRO-1, the distributed optimizer",
    "gradients-in-fp32": "gradients accumulated in 4 bytes",
    "overlap-gradients": "reduced beside the backward",
    "overlap-parameters": "gathered beside the forward",
    "expandable-segments": "of PyTorch's allocator (PYTORCH_CUDA_ALLOC_CONF)",
    "overlap-collectives": "tensor-parallel collectives beside matrix products",
}


def _layout(text: str) -> Layout:
    parts = [part.strip() for part in text.split(",")]
    further = [number for number, part in enumerate(parts) if part.endswith("m")]
    numbers = [part.removesuffix("m") for part in parts]
    if not all(part.isdecimal() for part in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers; give layers of each part, such as 9,10,10,9")
    if len(further) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} has m in {len(further)} parts; all further tokens are of one")
    return Layout(tuple(map(int, numbers)), further[0] if further else None)


def notes_of(arguments: Namespace, of: Model, run: Run, searched: bool = False) -> list[str]:
    """Return a line for each option that has no effect. Raises EstimateError for one that Megatron refuses."""
    names = {name.replace("_", "-") for name, value in vars(arguments).items() if value is not None}
    return without_effect(Given(names, Values(arguments), of, run, arguments.framework != "deepspeed"), searched)


def _run(arguments: Namespace) -> None:
    try:
        of, nodes = model_and_cluster(arguments)
        by, run = framework_named(arguments), _run_of(arguments, nodes)
        notes = notes_of(arguments, of, run.of(by))
        shown = Estimator(of, nodes, by)(run)
    except DescriptionError as error:
        raise UsageError(str(error)) from error
    except EstimateError as error:
        raise UsageError(in_flags(error)) from error
    show(shown, of, nodes, arguments.json, str, *notes)


def _run_of(arguments: Namespace, nodes: Cluster) -> Run:
    """Return the run that is asked for, over the whole cluster."""
    of_replica = arguments.tensor_parallel * arguments.stages * arguments.context_parallel
    data = arguments.data_parallel
    if data is None:
        if of_replica > nodes.gpus:
            raise UsageError(
                f"--cluster {nodes.name}: has {nodes.gpus} GPUs, {of_replica - nodes.gpus} too few for tensor × "
                f"context × pipeline parallelism of {of_replica}: name a larger one, or divide less"
            )
        if nodes.gpus % of_replica:
            raise UsageError(
                f"--cluster {nodes.name}: its {nodes.gpus} GPUs do not divide into replicas of {of_replica} (tensor × "
                "context × pipeline): choose these so that they do"
            )
        data = nodes.gpus // of_replica
    correction = arguments.evenpipe_delay_correction
    if correction not in (None, "none") and arguments.schedule != "2bw":
        raise UsageError(
            f"--evenpipe-delay-correction {correction}: only --schedule 2bw has gradients that are a batch late: use "
            "that, or leave --evenpipe-delay-correction out"
        )
    name = arguments.precision
    check_precisions(arguments, [] if name is None else [name])
    plain = Namespace(**vars(arguments) | {"precision": name if name in get_args(Precision) else None})
    precision, attention = computed_in(plain, nodes)
    switches = {option.replace("-", "_"): getattr(arguments, option.replace("-", "_")) for option in _SWITCHES}
    run = Run(
        global_batch=arguments.global_batch_size,
        tensor=arguments.tensor_parallel,
        stages=arguments.stages,
        data=data,
        context=arguments.context_parallel,
        expert=arguments.expert_parallel,
        chunks=arguments.chunks,
        micro_batch=arguments.micro_batch_size,
        recompute=_RECOMPUTE[arguments.recompute],
        schedule=arguments.schedule,
        bpipe=arguments.bpipe,
        group_size=arguments.group_size,
        layout=arguments.layout and arguments.layout.layers,
        further_part=arguments.layout and arguments.layout.further,
        synchronous_transfers=arguments.synchronous_transfers,
        message_ms=arguments.message_ms,
        placement=arguments.placement,
        precision=precision,
        attention=attention,
        expert_tensor=arguments.expert_tensor_parallel,
        **switches,
        **features_of(Values(arguments)),
    )
    return run if name is None or name in get_args(Precision) else in_precision(run, name, arguments.fp8_recipe)
