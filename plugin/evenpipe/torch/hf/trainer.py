"""PipelineTrainer: transformers' `TrainingArguments`, a model and data sets, trained in a pipeline of all ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenpipe.partition.dawnpiper.capuchin import Optimize
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
from evenpipe.torch.hf.callbacks import Callbacks
from evenpipe.torch.hf.checkpoints import load_stage, resumed_from, save_checkpoint
from evenpipe.torch.hf.counting import may_count, shifts_labels
from evenpipe.torch.hf.cut_model import CutModel
from evenpipe.torch.hf.evaluation import Compute, Metrics
from evenpipe.torch.hf.loading import transformers
from evenpipe.torch.hf.optimizer import adamw, weight_groups
from evenpipe.torch.hf.plans import COUNT
from evenpipe.torch.hf.saving import save_pretrained
from evenpipe.torch.hf.unsupported import refuse_unsupported
from evenpipe.torch.planned import PlannedPipeline
from evenpipe.torch.scaling import PipelineScaler

__all__ = ["PipelineTrainer", "Trained"]

#: Lengths are rounded up to buckets from this on, in tokens.
_SHORTEST: Final = 8


class Trained(NamedTuple):
    """How many optimizer steps were made, and their losses' mean."""

    global_step: int
    training_loss: float


class PipelineTrainer:
    """Trains a Hugging Face model in a pipeline, one stage a rank: what `transformers.Trainer` is to one process.

    model: a name or folder, whose weights each rank reads for its own stage, or a model with values, alike on all.
    args: `TrainingArguments`. A replica's batch has `gradient_accumulation_steps` micro-batches of
    `per_device_train_batch_size`; an incomplete last batch of an epoch is left out.
    train_dataset, eval_dataset: with a length and samples by number, alike on all ranks. data_collator: makes a batch
    of samples; left out, it pads to the longest by `processing_class` if that is given, or stacks. Lengths are rounded
    up to buckets (8, 16, 24, 32, 48, …), each with a plan of its own.
    callbacks: transformers', called on every rank. compute_metrics: called for the predictions of an evaluation, on the
    last stage of the first pipeline; preprocess_logits_for_metrics on each last stage.
    optimizer: makes one of parameter groups; AdamW if left out.
    stages: of each pipeline, all processes if left out; with fewer there are replicas, by `evenpipe.torch.replicas`.
    schedule, bpipe: a schedule that flushes. optimize, memory_gib: what stages recompute, so as to fit. data_sheet:
    the device whose times decide the cuts.

    All ranks that torchrun started make it alike. Raises ModelError, one line, for a model that cannot be had or cut,
    and for settings that would be passed over.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        args: Any,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Collator | None = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] = (),
        compute_metrics: Compute | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        stages: int | None = None,
        schedule: str = "1f1b",
        bpipe: bool = False,
        optimize: Optimize = "none",
        memory_gib: float | None = None,
        data_sheet: str = "a100-80gb",
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    ) -> None:
        library = transformers()
        refuse_unsupported(args, optimizer is not None)
        library.set_seed(args.seed)  # data sets and collators draw alike on all ranks
        self._cut = cut = CutModel(model, args, stages, schedule, bpipe, optimize, memory_gib, data_sheet)
        self._ranks, self._device, self._autocast, self.model = cut.ranks, cut.device, cut.autocast, cut.model
        self._replicas = self._ranks.replicas.size()
        if args.eval_strategy != "no" and eval_dataset is None:
            raise ModelError(f"eval_strategy={args.eval_strategy.value}: on which data? Give eval_dataset=")
        self.args, self.train_dataset, self.eval_dataset = args, train_dataset, eval_dataset
        if data_collator is None:
            with_padding = processing_class is not None
            data_collator = (
                library.DataCollatorWithPadding(processing_class) if with_padding else library.default_data_collator
            )
        self._collate: Collator = data_collator
        self._micro_batches, self._micro_size = args.gradient_accumulation_steps, args.per_device_train_batch_size
        self._scaler: PipelineScaler | None = None
        self._compute_metrics, self._preprocess = compute_metrics, preprocess_logits_for_metrics
        self._pipelines: dict[Any, tuple[PlannedPipeline, bool]] = {}
        self._make_optimizer = optimizer or partial(adamw, args)
        self._callbacks = Callbacks(args, callbacks, self.model, processing_class, self._device)

    @property
    def log_history(self) -> list[dict[str, float]]:
        """The log so far, in the form of `Trainer.state.log_history`."""
        history: list[dict[str, float]] = self._callbacks.state.log_history
        return history

    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> Trained:
        """Train as the arguments say; with a checkpoint's folder, or True for the newest, go on from there.

        All ranks call it. Raises ModelError.
        """
        args, callbacks = self.args, self._callbacks
        if self.train_dataset is None:
            raise ModelError("train: on which data? Give train_dataset=")
        per_epoch = len(self.train_dataset) // self._batch_samples
        if not per_epoch:
            raise ModelError(
                f"train_dataset: {len(self.train_dataset)} samples are no batch of {self._batch_samples}: give "
                "more, or a smaller gradient_accumulation_steps or per_device_train_batch_size"
            )
        asked = args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        folder = resumed_from(asked, args.output_dir)
        steps = args.max_steps if args.max_steps > 0 else int(args.num_train_epochs * per_epoch)
        pipeline, _ = self._pipeline(next(self._training_batches(per_epoch, 0)))
        optimizer = self._make_optimizer(weight_groups(self.model, pipeline, args))
        scheduler = transformers().get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            args.get_warmup_steps(steps),
            steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
        done = 0
        if folder is not None:
            state = load_stage(folder, pipeline, self.model, self._saved(optimizer, scheduler))
            callbacks.resume(state)
            done = state.global_step
        callbacks.begin(steps, per_epoch, optimizer, scheduler)
        unlogged: list[Tensor] = []
        total = 0.0
        for step, batch in enumerate(islice(self._training_batches(per_epoch, done), max(0, steps - done)), done):
            if step % per_epoch == 0 or step == done:
                callbacks.call("on_epoch_begin")
            callbacks.call("on_step_begin")
            loss, norm = self._gradients(batch, optimizer, step)
            rate = optimizer.param_groups[0]["lr"]
            callbacks.call("on_pre_optimizer_step")
            if self._scaler is None:
                optimizer.step()
            else:
                self._scaler.step(optimizer)
                self._scaler.update()
            callbacks.call("on_optimizer_step")
            # The scaler skips a step where any gradient of any stage is not finite, and then their norm is not either.
            if self._scaler is None or math.isfinite(norm):
                scheduler.step()
            unlogged.append(loss)
            callbacks.state.global_step, callbacks.state.epoch = step + 1, (step + 1) / per_epoch
            ended = ["on_step_end", *(["on_epoch_end"] if (step + 1) % per_epoch == 0 else [])]
            for event in ended:
                callbacks.call_and_agree(event)
                if callbacks.control.should_log and unlogged:
                    total += (value := self._sum(unlogged))
                    self._log({"loss": value / len(unlogged), "grad_norm": norm, "learning_rate": rate})
                    unlogged.clear()
                if callbacks.control.should_evaluate:
                    self.evaluate()
                if callbacks.control.should_save:
                    self._save_checkpoint(optimizer, scheduler)
            callbacks.agree()  # on what those of logs, evaluations and checkpoints asked for
            if callbacks.control.should_epoch_stop:
                raise ModelError("should_epoch_stop: an epoch does not end early here: set should_training_stop")
            if callbacks.control.should_training_stop:
                break
        total += self._sum(unlogged)
        callbacks.call("on_train_end")
        made = callbacks.state.global_step - done
        return Trained(callbacks.state.global_step, total / max(1, made))

    def _gradients(self, batch: Batch, optimizer: torch.optim.Optimizer, step: int) -> tuple[Tensor, float]:
        """Compute a batch's gradients; return this rank's part of the loss, and the gradients' norm before clipping."""
        pipeline, counts = self._pipeline(batch)
        optimizer.zero_grad()
        pipeline.batches = step * self._replicas + self._ranks.replica
        with autocasting(self._device.type, self._autocast):
            loss = pipeline.step(self._given(batch, counts))
        pipeline.reduce_gradients(self._ranks.replicas, mean=not counts)
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)
        norm = pipeline.clip_grad_norm(self.args.max_grad_norm or 0.0)
        part = torch.zeros(()) if loss is None else loss.float().cpu()
        return part / (1 if counts else self._replicas), norm

    def _saved(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
        """Return, by name, what a checkpoint has the state of, beside the model and random numbers."""
        scaling = {} if self._scaler is None else {"scaler": self._scaler}
        return {"optimizer": optimizer, "scheduler": scheduler, **scaling}

    def _save_checkpoint(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        args, callbacks = self.args, self._callbacks
        folder = Path(args.output_dir) / f"checkpoint-{callbacks.state.global_step}"
        writes = self._ranks.replica == 0
        save_checkpoint(
            folder, self._any_pipeline, self.model, self._saved(optimizer, scheduler), callbacks.state, writes
        )
        if dist.get_rank() == 0:
            transformers().trainer_utils.rotate_checkpoints(args.output_dir, args.save_total_limit)
        callbacks.call("on_save")

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Return `eval_loss`, the mean over all labels that count, without dropout, and `compute_metrics`' results.

        All ranks call it. Raises ModelError.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if not dataset:
            raise ModelError("evaluate: on which data? Give eval_dataset= with a sample at least")
        total, weight = 0.0, 0.0
        computed = None
        if self._compute_metrics is not None and not self.args.prediction_loss_only:
            computed = Metrics(self._compute_metrics, self._preprocess, self.args, self.model, self._ranks)
        for start in range(0, len(dataset), self._batch_samples):
            numbers = range(start, min(start + self._batch_samples, len(dataset)))
            batch = self._batch(dataset, numbers)
            pipeline, counts = self._pipeline(batch)
            of_each = self._shared_out(self._counted(batch))
            given = self._mine(batch.tensors) | ({COUNT: torch.tensor(1)} if counts else {})
            with autocasting(self._device.type, self._autocast):
                found = pipeline.evaluate(self._moved(given))
            for loss, count in zip(found.losses, of_each, strict=bool(found.losses)):
                if count:
                    total += loss.item() * (1 if counts else count)
            weight += sum(self._counted(batch))
            if computed is not None:
                computed.add(found.outputs, batch, len(numbers), numbers.stop == len(dataset))
        metrics = {"eval_loss": self._sum([torch.tensor(total)]) / weight}
        metrics |= {} if computed is None else computed.result()
        self._log(metrics)
        self._callbacks.call("on_evaluate", metrics=metrics)
        return metrics

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Save what `from_pretrained` loads, each rank its stage; to the arguments' `output_dir`, if left out."""
        if not self._pipelines:
            raise ModelError("save_model: nothing was trained or evaluated yet: call train first")
        if self._ranks.replica == 0:
            save_pretrained(self._any_pipeline, self.model, self.args.output_dir if output_dir is None else output_dir)
        dist.barrier()

    def close(self) -> None:
        """Close the links between stages and remove the plans; the model's own tensors stay."""
        for pipeline, _ in self._pipelines.values():
            pipeline.close()
        self._cut.remove_plans()

    @property
    def _batch_samples(self) -> int:
        """Return the samples of one batch of all replicas."""
        return int(self._micro_batches * self._micro_size * self._replicas)

    @property
    def _any_pipeline(self) -> PlannedPipeline:
        return next(iter(self._pipelines.values()))[0]

    def _training_batches(self, per_epoch: int, start: int) -> Iterator[Batch]:
        """Yield batches without end, from number `start` on, in an order that seed and epoch decide, as `Trainer`'s."""
        count = len(self.train_dataset)
        drawn = torch.Generator()
        drawn.manual_seed(self.args.seed if self.args.data_seed is None else self.args.data_seed)
        shuffles = self.args.train_sampling_strategy == "random"
        for epoch in itertools.count():
            order = torch.randperm(count, generator=drawn).tolist() if shuffles else list(range(count))
            for number in range(max(0, min(per_epoch, start - epoch * per_epoch)), per_epoch):
                yield self._batch(self.train_dataset, order[number * self._batch_samples :][: self._batch_samples])

    def _batch(self, dataset: Any, numbers: Sequence[int]) -> Batch:
        kept = (self.args.label_names or ["labels"]) if self.args.remove_unused_columns else None
        samples = list(samples_of(dataset, self.model, numbers, kept))
        collated = split_constants(self._collate(samples))
        tensors = collated.tensors
        tokens, length = tensors.get("input_ids"), None
        if tokens is not None and tokens.dim() == 2:
            config: Any = self.model.config
            length = tokens.shape[1]
            longest = getattr(config, "max_position_embeddings", None) or 1 << 60
            to = max(min(bucket_of(tokens.shape[1], _SHORTEST), longest), tokens.shape[1])
            tensors = padded(tensors, to, {"input_ids": getattr(config, "pad_token_id", None) or 0})
        return Batch(filled(tensors, self._batch_samples), collated.constants, length)

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
        counted = "labels" in inputs and may_count(self.model)
        pipeline, counts = self._cut.pipeline({**inputs, **batch.constants}, counted)
        if self._autocast == torch.float16 and self._scaler is None:
            self._scaler = PipelineScaler(pipeline)
        pipeline.scaler = self._scaler
        return pipeline, counts

    def _given(self, batch: Batch, counts: bool) -> dict[str, Tensor]:
        count = {COUNT: torch.tensor(sum(self._counted(batch)))} if counts else {}
        return self._moved(self._mine(batch.tensors) | count)

    def _mine(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this replica's samples of a batch."""
        return {name: self._shared_out(one) if one.dim() else one for name, one in tensors.items()}

    def _shared_out(self, each: Any) -> Any:
        """Return this replica's part of something with as many entries for each."""
        part = len(each) // self._replicas
        return each[self._ranks.replica * part :][:part]

    def _moved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: one.to(self._device) for name, one in tensors.items()}

    def _counted(self, batch: Batch) -> list[int]:
        """Return how many labels count in each micro-batch of all replicas; where there are none, its samples."""
        tensors = dict(batch.tensors)
        if "labels" in tensors and tensors["labels"].dim() == 2 and shifts_labels(self.model):
            tensors["labels"] = tensors["labels"][:, 1:]
        number = self._micro_batches * self._replicas
        found = counted_labels(tensors, number)
        return [self._micro_size] * number if found is None else found

    def _sum(self, parts: Sequence[Tensor]) -> float:
        """Return the sum over all ranks of what each has, which is zero but on last stages."""
        mine = torch.stack([torch.zeros(()), *parts]).double().sum() if self._any_pipeline.is_last else torch.zeros(())
        total = mine.to(self._device, torch.float64)
        dist.all_reduce(total)
        return float(total)

    def _log(self, row: dict[str, float]) -> None:
        state = self._callbacks.state
        state.log_history.append({**row, "epoch": state.epoch, "step": state.global_step})
        self._callbacks.call("on_log", logs=row)
        _say(str({name: f"{value:.4g}" for name, value in row.items()} | {"step": state.global_step}))


def _say(line: str) -> None:
    """Print `line` once for all ranks."""
    if dist.get_rank() == 0:
        print(line, flush=True)
