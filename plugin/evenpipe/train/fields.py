"""The options of `evenpipe train`, one by one, and what follows from them."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from evenpipe.schedule import DelayCorrection, Program, Programs, Schedule, Size, choose, names

__all__ = ["BUILTIN_TEXT", "OptionFields"]

BUILTIN_TEXT: Final = "builtin"


class OptionFields(BaseModel):
    """The options of a training run; immutable. The fields' descriptions are the help of the command-line flags."""

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
