"""The options of `evenpipe train`, checked. Each rule raises ValueError: one line that names a flag and a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from evenpipe.schedule import (
    DelayCorrection,
    Program,
    Programs,
    Schedule,
    ScheduleError,
    Size,
    Stream,
    check_offers,
    choose,
    names,
)
from evenpipe.settings.config import EvenPipeConfig, first_problem
from evenpipe.settings.contradictions import CONTRADICTIONS, CONTRADICTIONS_ON_CPU, contradiction_in, only_tuned
from evenpipe.settings.spelling import COMMAND, command_flag, in_flags
from evenpipe.train.engines import ENGINES
from evenpipe.train.planned_options import OptionsError, as_planned

__all__ = [
    "BUILTIN_TEXT",
    "EXPERTS_OF_A_TOKEN",
    "RULES",
    "OptionsError",
    "TrainOptions",
    "device_type",
    "fits_this_machine",
]

BUILTIN_TEXT: Final = "builtin"
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
#: Of schedules whose stages step by themselves, which no norm of all gradients can hold up.
_NOT_CLIPPED: Final = {"paci": {"clip_grad": 0.0}}
#: What Megatron's own functions carry out.
_MEGATRONS: Final = ("1f1b", "interleaved")


def device_type(world_size: int) -> str:
    """Return the device of a run's processes on this machine: "cuda" with a GPU for every process, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= world_size else "cpu"


def fits_this_machine(options: TrainOptions) -> None:
    if options.world_size > _MOST_PROCESSES:
        raise ValueError(
            f"--stages {options.stages}: with --data-parallel {options.data_parallel} and --tensor-parallel "
            f"{options.tensor_parallel} {options.world_size} processes on this machine: use at most {_MOST_PROCESSES}"
        )
    if not options.data:
        raise ValueError("--data: no file named: give a text file, or builtin")


def _model_fits_its_ranks(options: TrainOptions) -> None:
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


def _experts_fit_their_ranks(options: TrainOptions) -> None:
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


def _schedule_exists(options: TrainOptions) -> None:
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


def _steps_alone(options: TrainOptions) -> None:
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
    if options.experts:
        raise ValueError(
            f"--experts {options.experts}: have not been shown to train by the rule of --schedule {options.schedule}: "
            "leave them out, or use 2bw"
        )


def _settings_go_together(options: TrainOptions) -> None:
    shared = ("schedule", "bpipe", "group_size", "retune_interval", "memory_gib", "delay_correction")
    config = EvenPipeConfig.of(**{setting: getattr(options, setting) for setting in shared})
    on_cpu = options.group_size == "auto" and device_type(options.world_size) == "cpu"
    tuned = map(only_tuned, ("retune_interval", "memory_gib"))
    rows = (*tuned, *CONTRADICTIONS, *(CONTRADICTIONS_ON_CPU if on_cpu else ()))
    if (line := contradiction_in(config, COMMAND, rows)) is not None:
        raise ValueError(line)


def _engine_knows_its_settings(options: TrainOptions) -> None:
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


def _optimizer_knows_its_settings(options: TrainOptions) -> None:
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


def _saved_somewhere(options: TrainOptions) -> None:
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


class TrainOptions(BaseModel):
    """A training run; immutable. `TrainOptions.of(...)` gives one-line errors, the constructor pydantic's own.

    The fields' descriptions are the help of the command-line flags.
    """

    rules: ClassVar[tuple[Callable[[TrainOptions], None], ...]] = RULES
    model_config = ConfigDict(frozen=True, extra="forbid")

    partition: str | None = Field(
        None, description="train the model that this plan cuts (evenpipe partition --out), on random data, as it says"
    )
    model: Literal["gpt", "bert"] = Field("gpt", description="gpt | bert")
    layers: int = Field(8, ge=1, description="transformer layers of the whole model")
    hidden: int = Field(128, ge=1, description="hidden size")
    heads: int = Field(4, ge=1, description="attention heads")
    seq_length: int = Field(128, ge=2, description="tokens (bytes of text) in a sample")
    min_length: int = Field(
        0, ge=0, description="let micro-batches have lengths of their own, from this to --seq-length; 0: all have that"
    )
    untie_embeddings: bool = Field(
        False, description="give the output layer weights of its own (--engine module: always)"
    )
    experts: int = Field(
        0, ge=0, description="experts in each layer (gpt), two of which take a token; none is dropped; 0: dense"
    )
    expert_parallel: int = Field(
        1, ge=1, description="data-parallel replicas among which the experts of each layer are shared out"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout of hidden states and attention")
    data: str = Field(BUILTIN_TEXT, description="a text file, or builtin: text that comes with Python")

    stages: int = Field(4, ge=1, description="pipeline stages")
    data_parallel: int = Field(1, ge=1, description="data-parallel replicas")
    tensor_parallel: int = Field(1, ge=1, description="tensor-parallel ranks of every stage")
    chunks: int = Field(1, ge=1, description="model chunks a stage, where the schedule has several")

    micro_batch_size: int = Field(1, ge=1, description="samples in a micro-batch")
    micro_batches: int = Field(8, ge=1, description="micro-batches in an iteration of each replica")
    iterations: int = Field(5, ge=1, description="optimizer steps, those before a --load among them")
    seed: int = Field(1234, ge=0, lt=2**31, description="of weights, samples and dropout")

    timeout_minutes: float = Field(
        10.0,
        gt=0,
        le=24 * 60,
        allow_inf_nan=False,
        description="how long processes wait for each other; then the run ends, and the one that is silent is named",
    )

    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="of the model: fp32 | bf16 | fp16; the optimizer's is always fp32"
    )
    initial_loss_scale: float = Field(
        65536.0, ge=1, allow_inf_nan=False, description="where the dynamic loss scale of fp16 starts"
    )
    optimizer: Literal["adam", "sgd", "muon"] = Field(
        "adam", description="adam | sgd | muon (--engine module: of torch, with AdamW for embeddings and vectors)"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="of SGD")
    weight_decay: float = Field(0.01, ge=0, allow_inf_nan=False, description="weight decay")
    lr: float = Field(1e-3, gt=0, le=1e6, allow_inf_nan=False, description="learning rate")
    lr_warmup: int = Field(0, ge=0, description="iterations in which the learning rate rises to --lr")
    lr_decay: Literal["none", "cosine"] = Field("none", description="none | cosine (to a tenth in the last iteration)")
    clip_grad: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="clip the gradient to this norm; 0 does not clip (paci's default)"
    )
    distributed_optimizer: bool = Field(False, description="share the optimizer's state out between replicas")

    schedule: str = Field("1f1b", description=" | ".join((*names(), "file:PATH")))
    group_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        1, description="micro-batches in a row (kfkb only): a number, or auto, which is chosen again as links change"
    )
    retune_interval: int | None = Field(
        None,
        ge=1,
        description="iterations between two choices of --group-size auto; as many as an hour takes, if left out",
    )
    memory_gib: float | None = Field(
        None,
        gt=0,
        le=2**30,
        description="what --group-size auto may use on each device; nine tenths of a GPU's, if left out",
    )
    engine: Literal["evenpipe", "megatron", "module", "planned"] = Field(
        "evenpipe",
        description="who carries the schedule out: evenpipe (in megatron-core) | megatron (its own functions) | "
        "module (plain PyTorch); planned: what --partition does, plain PyTorch too",
    )
    delay_correction: DelayCorrection = Field(
        "none", description="2bw: none | error-feedback | weight-prediction | nesterov (docs/2bw.md)"
    )
    bpipe: bool = Field(False, description="level the stages' memory by evicting to partner stages")
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="what the backward computes again: none | selective (attention) | full (each layer)"
    )
    overlap_grad_reduce: bool = Field(False, description="reduce gradients between replicas during the last backward")

    save: str | None = Field(
        None, description="folder for checkpoints: one at the end, and one on SIGTERM, SIGINT or SIGHUP"
    )
    save_interval: int = Field(0, ge=0, description="also save whenever so many iterations are done; 0: only then")
    keep: int = Field(
        0, ge=0, description="checkpoints that stay in --save, the newest ones; older ones are removed; 0: all stay"
    )
    load: str | None = Field(None, description="go on from the latest checkpoint in this folder")
    trust: bool = Field(
        False, description="execute Python of the plan in --partition: its model's file, and changed stage files"
    )

    @classmethod
    def of(cls, **values: Any) -> TrainOptions:
        """Checked options. Raises OptionsError: one line that names the flag and what to do."""
        try:
            return cls(**_NOT_CLIPPED.get(str(values.get("schedule")), {}) | as_planned(values))
        except ValidationError as error:
            raise OptionsError(_in_one_line(error)) from None

    @model_validator(mode="after")
    def _go_together(self) -> TrainOptions:
        for rule in self.rules:
            rule(self)
        return self

    @property
    def world_size(self) -> int:
        """Processes: stages × data-parallel × tensor-parallel."""
        return self.stages * self.data_parallel * self.tensor_parallel

    @property
    def programs(self) -> Programs:
        """The schedule that these options ask for, for any size. Raises ScheduleError when there is none."""
        return Programs(choose(self.schedule), self.bpipe, swaps=self.swaps)

    @cached_property
    def swaps(self) -> tuple[int, ...]:
        """The positions of the parts of a plan that swap tensors to their hosts."""
        if self.partition is None:
            return ()
        from evenpipe.partition.search.plan import Plan

        return Plan.read(Path(self.partition)).swaps

    @property
    def streams(self) -> bool:
        """Return whether batches are not flushed."""
        return "stream" in self.programs.spec.needs

    @property
    def in_place(self) -> bool:
        """Return whether stages step by themselves, over their only weights."""
        return "in_place" in self.programs.spec.needs

    @cached_property
    def program(self) -> Program:
        """The verified program of these options, auto being 1. Raises ScheduleError when there is none."""
        group_size = 1 if self.group_size == "auto" else self.group_size
        batches = min(self.iterations, 3) if self.streams else 1
        return self.programs(Size(self.stages, self.micro_batches, self.chunks, group_size, batches))

    @property
    def plan(self) -> Schedule:
        """The schedule of `program`."""
        return self.program.schedule


def _in_one_line(error: ValidationError) -> str:
    """Return the first thing that pydantic found, as a line of ours."""
    first = error.errors()[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    (field, *_), given, wrong = first_problem(error)
    if first["type"] == "extra_forbidden":
        return f"{command_flag(str(field))}: no such option: see evenpipe train --help"
    return f"{command_flag(str(field))} {given}: {wrong}"
