"""PipelineTrainer: transformers' `TrainingArguments`, a model and data sets, trained in a pipeline of all ranks."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenpipe.partition.dawnpiper.capuchin import Optimize
from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.models import ModelError
from evenpipe.runtime.precisions import autocasting
from evenpipe.torch.hf.batches import (
    Batch,
    Collator,
    bucket_of,
    counted_labels,
    filled,
    padded,
    samples_of,
    split_constants,
)
from evenpipe.torch.hf.loading import Checkpoint, Pretrained, transformers, weightless_model
from evenpipe.torch.hf.plans import COUNT, Cutting, Plans, adopt
from evenpipe.torch.hf.saving import save_pretrained
from evenpipe.torch.planned import PlannedPipeline

__all__ = ["PipelineTrainer", "Trained"]

#: Settings of `TrainingArguments` that would change the run, the values with which they do not, and what to do.
_UNSUPPORTED: Final[tuple[tuple[str, tuple[Any, ...], str], ...]] = (
    ("fp16", (False,), "use bf16=True"),
    ("gradient_checkpointing", (False,), 'give optimize="recompute", which recomputes what a stage has no room for'),
    ("deepspeed", (None,), "use evenpipe.deepspeed"),
    ("fsdp", (None, False, "", []), "leave it out: a pipeline shards the model already"),
    ("optim", ("adamw_torch", "adamw_torch_fused"), "give optimizer=, a function of parameter groups"),
    ("label_smoothing_factor", (0.0, 0), "leave it out: the model computes its loss"),
    ("neftune_noise_alpha", (None,), "leave it out"),
    ("train_sampling_strategy", ("random", "sequential"), "use random or sequential"),
    ("eval_strategy", ("no",), "leave it out, and call evaluate"),
    ("resume_from_checkpoint", (None, False), "give the folder that save_model wrote as the model"),
    ("load_best_model_at_end", (False,), "leave it out"),
    ("torch_compile", (False,), "leave it out: stages are generated code"),
    ("use_liger_kernel", (False,), "leave it out"),
)
_UNDECAYED: Final = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
#: Lengths are rounded up to buckets from this on, in tokens.
_SHORTEST: Final = 8


class Trained(NamedTuple):
    """How many optimizer steps were made, and their losses' mean."""

    global_step: int
    training_loss: float


class PipelineTrainer:
    """Trains a Hugging Face model in a pipeline, one stage a rank: what `transformers.Trainer` is to one process.

    model: a name or folder, whose weights each rank reads for its own stage, or a model with values, alike on all.
    args: `TrainingArguments`. A batch has `gradient_accumulation_steps` micro-batches of `per_device_train_batch_size`;
    an incomplete last batch of an epoch is left out.
    train_dataset, eval_dataset: with a length and samples by number, alike on all ranks. data_collator: makes a batch
    of samples; left out, it pads to the longest by `processing_class` if that is given, or stacks. Lengths are rounded
    up to buckets (8, 16, 24, 32, 48, …), each with a plan of its own.
    optimizer: makes one of parameter groups; AdamW if left out.
    schedule, bpipe: a schedule that flushes. optimize, memory_gib: what stages recompute, so as to fit. data_sheet:
    the device whose times decide the cuts.

    All ranks that torchrun started make it alike, and are one pipeline. Raises ModelError, one line, for a model that
    cannot be had or cut, and for settings that would be passed over.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        args: Any,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Collator | None = None,
        processing_class: Any = None,
        *,
        schedule: str = "1f1b",
        bpipe: bool = False,
        optimize: Optimize = "none",
        memory_gib: float | None = None,
        data_sheet: str = "a100-80gb",
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    ) -> None:
        library = transformers()
        for name, known, remedy in _UNSUPPORTED:
            given = getattr(args, name, known[0])
            if given not in known and not (name == "optim" and optimizer is not None):
                raise ModelError(f"{name}={given!s}: the pipeline does not do that: {remedy}")
        device = torch.device(args.device)  # which starts torch.distributed, as transformers has it
        if not dist.is_initialized():
            raise ModelError("a pipeline has a process a stage: start it by torchrun --nproc-per-node N")
        self.args, self.train_dataset, self.eval_dataset = args, train_dataset, eval_dataset
        found = Pretrained(model, None) if isinstance(model, nn.Module) else weightless_model(model)
        self.model = found.model.train()
        self._state = None if found.folder is None else Checkpoint(found.folder, self.model)
        if data_collator is None:
            with_padding = processing_class is not None
            data_collator = (
                library.DataCollatorWithPadding(processing_class) if with_padding else library.default_data_collator
            )
        self._collate: Collator = data_collator
        self._micro_batches, self._micro_size = args.gradient_accumulation_steps, args.per_device_train_batch_size
        self._device = torch.device("cpu") if device.type == "cpu" else device
        self._autocast = torch.bfloat16 if args.bf16 else None
        limit = torch.cuda.mem_get_info(self._device)[1] if self._device.type == "cuda" else 1 << 50
        cutting = Cutting(
            Workload(schedule, self._micro_batches, bpipe=bpipe),
            limit if memory_gib is None else int(memory_gib * 2**30),
            optimize,
            data_sheet,
            self._autocast,
        )
        self._folder = tempfile.TemporaryDirectory(prefix="evenpipe")
        self._plans = Plans(self.model, cutting, self._device, Path(self._folder.name))
        self._pipelines: dict[Any, tuple[PlannedPipeline, bool]] = {}
        self._make_optimizer = optimizer or self._adamw
        self.log_history: list[dict[str, float]] = []

    def train(self) -> Trained:
        """Train as the arguments say. All ranks call it."""
        args, library = self.args, transformers()
        per_epoch = len(self.train_dataset) // self._batch_samples
        if not per_epoch:
            raise ModelError(
                f"train_dataset: {len(self.train_dataset)} samples are no batch of {self._batch_samples}: give "
                "more, or a smaller gradient_accumulation_steps or per_device_train_batch_size"
            )
        if args.save_strategy != "no":
            _say(f"note: save_strategy={args.save_strategy!s}: nothing is saved on the way: call save_model")
        steps = args.max_steps if args.max_steps > 0 else int(args.num_train_epochs * per_epoch)
        batches = islice(self._training_batches(per_epoch), steps)
        optimizer: torch.optim.Optimizer | None = None
        losses: list[Tensor] = []
        for step, batch in enumerate(batches):
            pipeline, counts = self._pipeline(batch)
            if optimizer is None:
                optimizer = self._make_optimizer(self._groups(pipeline))
                scheduler = library.get_scheduler(
                    args.lr_scheduler_type,
                    optimizer,
                    args.get_warmup_steps(steps),
                    steps,
                    scheduler_specific_kwargs=args.lr_scheduler_kwargs,
                )
            optimizer.zero_grad()
            pipeline.batches = step
            with autocasting(self._device.type, self._autocast):
                loss = pipeline.step(self._given(batch, counts))
            norm = pipeline.clip_grad_norm(args.max_grad_norm or 0.0)
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()
            losses.append(torch.zeros(()) if loss is None else loss.float().cpu())
            if (step + 1) % max(int(args.logging_steps), 1) == 0 or step + 1 == steps:
                [value] = self._known([losses[-1].item()])
                self._log({"step": step + 1, "loss": value, "grad_norm": norm, "learning_rate": rate})
        [total] = self._known([torch.stack(losses).sum().item()])
        return Trained(len(losses), total / len(losses))

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Return `eval_loss`, the mean over all labels that count, without dropout. All ranks call it."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        total, weight = 0.0, 0.0
        for start in range(0, len(dataset), self._batch_samples):
            numbers = range(start, min(start + self._batch_samples, len(dataset)))
            batch = self._batch(dataset, numbers)
            pipeline, counts = self._pipeline(batch)
            of_each = self._counted(batch)
            given = batch.tensors | ({COUNT: torch.tensor(1)} if counts else {})
            with autocasting(self._device.type, self._autocast):
                found = pipeline.evaluate(self._moved(given))
            for loss, count in zip(found.losses, of_each, strict=bool(found.losses)):
                if count:
                    total += loss.item() * (1 if counts else count)
            weight += sum(of_each)
        [total] = self._known([total])
        metrics = {"eval_loss": total / weight}
        self._log(metrics)
        return metrics

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Save what `from_pretrained` loads, each rank its stage; to the arguments' `output_dir`, if left out."""
        if not self._pipelines:
            raise ModelError("save_model: nothing was trained or evaluated yet: call train first")
        save_pretrained(self._any_pipeline, self.model, self.args.output_dir if output_dir is None else output_dir)

    def close(self) -> None:
        """Close the links between stages and remove the plans; the model's own tensors stay."""
        for pipeline, _ in self._pipelines.values():
            pipeline.close()
        self._folder.cleanup()

    @property
    def _batch_samples(self) -> int:
        return int(self._micro_batches * self._micro_size)

    @property
    def _any_pipeline(self) -> PlannedPipeline:
        return next(iter(self._pipelines.values()))[0]

    def _training_batches(self, per_epoch: int) -> Iterator[Batch]:
        """Yield batches without end, in an order that the seed and the epoch decide, as `Trainer`'s."""
        count = len(self.train_dataset)
        drawn = torch.Generator()
        drawn.manual_seed(self.args.seed if self.args.data_seed is None else self.args.data_seed)
        shuffles = getattr(self.args, "train_sampling_strategy", "random") == "random"
        while True:
            order = torch.randperm(count, generator=drawn).tolist() if shuffles else list(range(count))
            for number in range(per_epoch):
                yield self._batch(self.train_dataset, order[number * self._batch_samples :][: self._batch_samples])

    def _batch(self, dataset: Any, numbers: Sequence[int]) -> Batch:
        samples = list(samples_of(dataset, self.model, numbers, self.args.label_names or ["labels"]))
        collated = split_constants(self._collate(samples))
        tensors = collated.tensors
        tokens = tensors.get("input_ids")
        if tokens is not None and tokens.dim() == 2:
            config: Any = self.model.config
            longest = getattr(config, "max_position_embeddings", None) or 1 << 60
            to = max(min(bucket_of(tokens.shape[1], _SHORTEST), longest), tokens.shape[1])
            tensors = padded(tensors, to, {"input_ids": getattr(config, "pad_token_id", None) or 0})
        return Batch(filled(tensors, self._batch_samples), collated.constants)

    def _pipeline(self, batch: Batch) -> tuple[PlannedPipeline, bool]:
        """Return the pipeline for batches of this shape, and whether its model divides by the number of tokens."""
        shape = tuple(sorted((name, tuple(one.shape), one.dtype) for name, one in batch.tensors.items()))
        key = (shape, tuple(sorted((name, repr(one)) for name, one in batch.constants.items())))
        if key not in self._pipelines:
            self._pipelines[key] = self._new_pipeline(batch)
        return self._pipelines[key]

    def _new_pipeline(self, batch: Batch) -> tuple[PlannedPipeline, bool]:
        size = self._micro_size
        inputs = {name: one[:size] if one.dim() else one for name, one in batch.tensors.items()}
        path, counts = self._plans.make({**inputs, **batch.constants}, "labels" in inputs and _may_count(self.model))
        state = None if self._pipelines else self._state
        with autocasting(self._device.type, self._autocast):
            pipeline = PlannedPipeline(path, self.model, device=self._device, state=state, seed=self.args.seed)
        adopt(self.model, pipeline.parts)
        return pipeline, counts

    def _given(self, batch: Batch, counts: bool) -> dict[str, Tensor]:
        return self._moved(batch.tensors | ({COUNT: torch.tensor(sum(self._counted(batch)))} if counts else {}))

    def _moved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: one.to(self._device) for name, one in tensors.items()}

    def _counted(self, batch: Batch) -> list[int]:
        """Return how many labels count in each micro-batch; where there are none, its samples."""
        tensors = dict(batch.tensors)
        if "labels" in tensors and tensors["labels"].dim() == 2 and _shifts(self.model):
            tensors["labels"] = tensors["labels"][:, 1:]
        found = counted_labels(tensors, self._micro_batches)
        return [self._micro_size] * self._micro_batches if found is None else found

    def _groups(self, pipeline: PlannedPipeline) -> list[dict[str, Any]]:
        names: Any = transformers().trainer_pt_utils.get_parameter_names(self.model, [nn.LayerNorm], _UNDECAYED)
        decayed = set(names)
        mine = [(name, one) for name, one in pipeline.named_parameters() if one.requires_grad]
        return [
            {"params": [one for name, one in mine if name in decayed], "weight_decay": self.args.weight_decay},
            {"params": [one for name, one in mine if name not in decayed], "weight_decay": 0.0},
        ]

    def _adamw(self, groups: Any) -> torch.optim.Optimizer:
        args = self.args
        return torch.optim.AdamW(
            groups,
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            fused=args.optim == "adamw_torch_fused",
        )

    def _known(self, mine: list[float]) -> list[float]:
        """Return on all ranks what the last stage knows; others have zeros."""
        pipeline = self._any_pipeline
        values = torch.tensor(mine if pipeline.is_last else [0.0] * len(mine), dtype=torch.float64, device=self._device)
        dist.all_reduce(values)
        return [float(value) for value in values.tolist()]

    def _log(self, row: dict[str, float]) -> None:
        self.log_history.append(row)
        _say(str({name: value if isinstance(value, int) else f"{value:.4g}" for name, value in row.items()}))


def _say(line: str) -> None:
    """Print it, once for all ranks."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def _may_count(model: nn.Module) -> bool:
    """Return whether `Trainer` would give the model the batch's number of tokens."""
    accepts = getattr(model, "accepts_loss_kwargs", None)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in _arguments(model).values())
    return takes_any if accepts is None else bool(accepts)


def _shifts(model: nn.Module) -> bool:
    """Return whether `Trainer` does not count the first label: its token follows none."""
    losses: Any = transformers().loss.loss_utils
    loss = losses.LOSS_MAPPING.get(getattr(model, "loss_type", None))
    return loss is losses.ForCausalLMLoss and not getattr(model.config, "is_encoder_decoder", False)


def _arguments(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters
