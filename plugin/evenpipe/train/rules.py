"""Check the options of `evenpipe train`. Each rule raises ValueError: one line, a flag and a remedy."""

from __future__ import annotations

import re
from typing import Final

from evenpipe.schedule import ScheduleError, Stream, check_offers
from evenpipe.settings.config import EvenPipeConfig
from evenpipe.settings.contradictions import CONTRADICTIONS, CONTRADICTIONS_ON_CPU, contradiction_in, only_tuned
from evenpipe.settings.spelling import COMMAND, in_flags
from evenpipe.train.engines import ENGINES
from evenpipe.train.fields import OptionFields

__all__ = ["EXPERTS_OF_A_TOKEN", "RULES", "device_type", "fits_this_machine"]

#: Of `experts`, those that take a token.
EXPERTS_OF_A_TOKEN: Final = 2
#: Beyond any machine's GPUs; a typing error should not start a thousand processes.
_MOST_PROCESSES: Final = 256
#: What engines in plain PyTorch know of settings of which they know only some.
_PLAIN_TORCH: Final[dict[str, tuple[object, ...]]] = {
    "tensor_parallel": (1,),
    "dropout": (0.0,),
    "experts": (0,),
    "expert_parallel": (1,),
    "min_length": (0,),
    "precision": ("fp32", "bf16"),
    "distributed_optimizer": (False,),
    "recompute": ("none",),
    "overlap_grad_reduce": (False,),
}
#: What Megatron's own functions carry out.
_MEGATRONS: Final = ("1f1b", "interleaved")


def device_type(world_size: int) -> str:
    """Return the device of a run's processes on this machine: "cuda" with a GPU for every process, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= world_size else "cpu"


def fits_this_machine(options: OptionFields) -> None:
    if options.world_size > _MOST_PROCESSES:
        raise ValueError(
            f"--stages {options.stages}: with --data-parallel {options.data_parallel} and --tensor-parallel "
            f"{options.tensor_parallel} {options.world_size} processes on this machine: use at most {_MOST_PROCESSES}"
        )
    if not options.data:
        raise ValueError("--data: no file named: give a text file, or builtin")


def _model_fits_its_ranks(options: OptionFields) -> None:
    if options.partition is not None:
        return
    layers, heads, hidden, ranks = options.layers, options.heads, options.hidden, options.tensor_parallel
    chunks = options.plan.chunks
    parts = options.stages * chunks
    if layers % parts:
        what = f"--stages {options.stages}" + (f" × --chunks {chunks}" if chunks > 1 else "")
        raise ValueError(f"--layers {layers}: not divisible by {what}: make it a multiple of {parts}")
    if hidden % heads:
        raise ValueError(f"--hidden {hidden}: not divisible by --heads {heads}: make it a multiple of {heads}")
    if ranks > heads:
        raise ValueError(f"--tensor-parallel {ranks}: more ranks than --heads {heads}: use at most {heads}")
    if heads % ranks:
        raise ValueError(f"--tensor-parallel {ranks}: does not divide --heads {heads}: use a divisor of it")
    _experts_fit_their_ranks(options)
    shortest, longest = options.min_length, options.seq_length
    if shortest == 1 or shortest > longest:
        raise ValueError(f"--min-length {shortest}: lengths are from 2 to --seq-length {longest}: choose one of these")


def _experts_fit_their_ranks(options: OptionFields) -> None:
    ranks = options.expert_parallel
    given = f"--expert-parallel {ranks}"
    if not options.experts:
        if ranks > 1:
            raise ValueError(f"{given}: there are no experts: give --experts, or leave --expert-parallel out")
        return
    for what, count in (("--experts", options.experts), ("--data-parallel", options.data_parallel)):
        if count % ranks:
            raise ValueError(f"{given}: does not divide {what} {count}: use a divisor of it")
    if options.experts < EXPERTS_OF_A_TOKEN:
        raise ValueError(f"--experts {options.experts}: a token takes two: give at least 2, or leave it out")
    if options.model != "gpt":
        raise ValueError(f"--experts {options.experts}: Megatron has none for {options.model}: use --model gpt")
    if options.tensor_parallel > 1:
        raise ValueError(
            f"--experts {options.experts}: --tensor-parallel {options.tensor_parallel} would need sequence "
            "parallelism, which is not offered here: leave --tensor-parallel out"
        )


def _schedule_exists(options: OptionFields) -> None:
    asked = f"--schedule {options.schedule}"
    if options.engine == "megatron" and options.schedule not in _MEGATRONS:
        needs = options.programs.spec.needs
        able = next((name for name, engine in ENGINES.items() if needs <= engine.offers), "evenpipe")
        raise ValueError(f"{asked}: Megatron has no such schedule: use --engine {able}")
    if options.schedule not in _MEGATRONS and options.stages == 1:
        raise ValueError(f"{asked}: one stage is no pipeline: use --schedule 1f1b, or at least 2 stages")
    if options.engine == "megatron" and options.bpipe:
        raise ValueError("--bpipe: Megatron has no such schedule: use --engine evenpipe")
    engine = ENGINES[options.engine]
    try:
        check_offers(options.programs.spec, engine.offers, engine.called)
        _ = options.program
        if options.streams:
            Stream(options.programs.spec, options.stages, options.micro_batches, options.bpipe)
    except ScheduleError as error:
        line = in_flags(error)  # of a table it has the name within, and not what was asked for
        raise ValueError(line if line.startswith(asked) else re.sub(r"^--schedule \S+:", f"{asked}:", line)) from None


def _steps_alone(options: OptionFields) -> None:
    if options.in_place and options.clip_grad > 0:
        raise ValueError(
            f"--clip-grad {options.clip_grad:g}: the norm is of all stages' gradients, and under --schedule "
            f"{options.schedule} a stage steps before the stages ahead of it have ended the batch: leave it out"
        )
    if not options.in_place or options.engine != "evenpipe":
        return
    if not options.untie_embeddings:
        raise ValueError(
            f"--schedule {options.schedule}: the step of a tied embedding would wait for another stage's gradient: "
            "add --untie-embeddings"
        )
    if options.precision == "fp16":
        raise ValueError(
            f"--precision fp16: under --schedule {options.schedule} a stage steps before it knows of an overflow on "
            "the stages ahead of it: use bf16"
        )


def _settings_go_together(options: OptionFields) -> None:
    shared = ("schedule", "bpipe", "group_size", "retune_interval", "memory_gib", "delay_correction")
    config = EvenPipeConfig.of(**{setting: getattr(options, setting) for setting in shared})
    on_cpu = options.group_size == "auto" and device_type(options.world_size) == "cpu"
    tuned = map(only_tuned, ("retune_interval", "memory_gib"))
    rows = (*tuned, *CONTRADICTIONS, *(CONTRADICTIONS_ON_CPU if on_cpu else ()))
    if (line := contradiction_in(config, COMMAND, rows)) is not None:
        raise ValueError(line)


def _engine_knows_its_settings(options: OptionFields) -> None:
    if (options.engine == "planned") != (options.partition is not None):
        raise ValueError("--engine planned: trains what a plan cuts: give --partition P.json, or leave --engine out")
    if options.trust and options.partition is None:
        raise ValueError("--trust: there are no stage files of a plan: give --partition P.json, or leave --trust out")
    if options.engine not in ("module", "planned"):
        return
    for name, known in _PLAIN_TORCH.items():
        given, bare = COMMAND.head(name, getattr(options, name)), COMMAND.mention(name, None)
        if getattr(options, name) not in known:
            other = "" if options.partition is not None else "use --engine evenpipe, or "
            raise ValueError(f"{given}: {ENGINES[options.engine].called} has none: {other}leave {bare} out")
    if options.group_size == "auto":
        raise ValueError("--group-size auto: --engine module chooses none: give a number, or use --engine evenpipe")


def _optimizer_knows_its_settings(options: OptionFields) -> None:
    if options.momentum and options.optimizer != "sgd":
        raise ValueError(f"--momentum {options.momentum}: is of SGD: use --optimizer sgd, or leave --momentum out")
    if options.delay_correction == "nesterov" and options.optimizer == "sgd" and not options.momentum:
        raise ValueError("--delay-correction nesterov: SGD has no momentum to look ahead by: give --momentum")
    if options.optimizer == "muon" and options.engine != "module":
        raise ValueError(
            "--optimizer muon: torch's Muon steps matrices within the model, which only --engine module tells from its "
            "ends: use that, or --optimizer adam"
        )
    if options.distributed_optimizer and options.optimizer != "adam":
        raise ValueError("--distributed-optimizer: Megatron shares out Adam only: use --optimizer adam")
    if options.lr_warmup >= options.iterations:
        raise ValueError(
            f"--lr-warmup {options.lr_warmup}: must end before --iterations {options.iterations}: "
            f"use at most {options.iterations - 1}"
        )
    if options.precision != "fp16" and "initial_loss_scale" in options.model_fields_set:
        raise ValueError(
            f"--initial-loss-scale {options.initial_loss_scale:g}: --precision {options.precision} scales no loss: "
            "use --precision fp16, or leave it out"
        )


def _saved_somewhere(options: OptionFields) -> None:
    if options.save_interval and options.save is None:
        raise ValueError(f"--save-interval {options.save_interval}: no folder to save to: give --save DIR")
    if options.keep and options.save is None:
        raise ValueError(f"--keep {options.keep}: no folder to keep checkpoints in: give --save DIR")
    for name, folder in (("--save", options.save), ("--load", options.load)):
        if folder == "":
            raise ValueError(f"{name}: no folder named: give one, or leave {name} out")


#: In the order in which they are checked; each takes the options for granted that those before it have checked.
RULES: Final = (
    fits_this_machine,
    _schedule_exists,
    _model_fits_its_ranks,
    _settings_go_together,
    _steps_alone,
    _engine_knows_its_settings,
    _optimizer_knows_its_settings,
    _saved_somewhere,
)
