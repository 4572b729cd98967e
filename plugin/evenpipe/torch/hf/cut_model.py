"""A Hugging Face model and its pipelines, one for each shape of batch; `pipeline` is one for a loop of your own."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenpipe.partition.dawnpiper.capuchin import Optimize
from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.models import ModelError
from evenpipe.runtime.precisions import autocasting
from evenpipe.torch.hf.loading import Checkpoint, Pretrained, weightless_model
from evenpipe.torch.hf.plans import Cutting, Plans, adopt
from evenpipe.torch.hf.unsupported import refuse_unsupported
from evenpipe.torch.planned import PlannedPipeline
from evenpipe.torch.replicas import groups_of

__all__ = ["CutModel", "pipeline"]

_NO_LIMIT: Final = 1 << 50


class CutModel:
    """A model of which each rank has one stage; all ranks make it alike. Raises ModelError.

    model: a name or folder, whose weights each rank reads for its own stage, `weightless_model`'s result, or a model
    with values, alike on all. The other options are those of `PipelineTrainer`.
    """

    def __init__(
        self,
        model: str | Path | nn.Module | Pretrained,
        args: Any,
        stages: int | None = None,
        schedule: str = "1f1b",
        bpipe: bool = False,
        optimize: Optimize = "none",
        memory_gib: float | None = None,
        data_sheet: str = "a100-80gb",
    ) -> None:
        device = torch.device(args.device)  # which starts torch.distributed, as transformers has it
        if not dist.is_initialized():
            raise ModelError("a pipeline has a process a stage: start it by torchrun --nproc-per-node N")
        try:
            self.ranks = groups_of(dist.get_world_size() if stages is None else stages)
        except ValueError as error:
            raise ModelError(str(error)) from error
        if isinstance(model, nn.Module):
            found = Pretrained(model, None)
        else:
            found = model if isinstance(model, Pretrained) else weightless_model(model)
        self.model = found.model.train()
        self.device = torch.device("cpu") if device.type == "cpu" else device
        self.autocast = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        self._seed = args.seed
        self._state = None if found.folder is None else Checkpoint(found.folder, self.model)
        limit = torch.cuda.mem_get_info(self.device)[1] if self.device.type == "cuda" else _NO_LIMIT
        cutting = Cutting(
            Workload(schedule, args.gradient_accumulation_steps, bpipe=bpipe),
            limit if memory_gib is None else int(memory_gib * 2**30),
            optimize,
            data_sheet,
            self.autocast,
        )
        self._folder = tempfile.TemporaryDirectory(prefix="evenpipe")
        self._plans = Plans(self.model, cutting, self.device, Path(self._folder.name), self.ranks.pipeline.size())

    def pipeline(self, inputs: Mapping[str, Any], counted: bool) -> tuple[PlannedPipeline, bool]:
        """Return the pipeline for micro-batches like `inputs`, and whether the model divides its loss by their tokens.

        counted: it may do that. The first pipeline reads the weights, and later ones share them.
        """
        path, counts = self._plans.make(inputs, counted)
        state, self._state = self._state, None
        with autocasting(self.device.type, self.autocast):
            made = PlannedPipeline(
                path,
                self.model,
                device=self.device,
                state=state,
                seed=self._seed,
                group=self.ranks.pipeline,
                job=dist.group.WORLD,
            )
        adopt(self.model, made.parts)
        return made, counts

    def remove_plans(self) -> None:
        """Remove the files of all plans; the pipelines that were made of them stay."""
        self._folder.cleanup()


def pipeline(
    model: str | Path | nn.Module | Pretrained, args: Any, batch: Mapping[str, Tensor], **options: Any
) -> PlannedPipeline:
    """Return the pipeline of a model for a training loop of your own, one stage a rank.

    model, options (`schedule`, `bpipe`, `optimize`, `memory_gib`, `data_sheet`): as of `PipelineTrainer`.
    args: `TrainingArguments`, for device, seed, bf16 or fp16 (step under that `torch.autocast`), and the number of
    micro-batches, `gradient_accumulation_steps`.
    batch: an example of what its `step` takes, in tensors alike on all ranks; all batches have these shapes.

    All ranks that torchrun started call it. Raises ModelError, one line.
    """
    refuse_unsupported(args, own_optimizer=True)
    parts = args.gradient_accumulation_steps
    sizes = {name: len(one) for name, one in batch.items() if one.dim()}
    for name, size in sizes.items():
        if not size or size % parts:
            raise ModelError(
                f"batch[{name!r}]: {size} samples are no multiple of gradient_accumulation_steps={parts}: give {parts} "
                "micro-batches of one size"
            )
    cut = CutModel(model, args, **options)
    inputs = {name: one[: sizes[name] // parts] if name in sizes else one for name, one in batch.items()}
    made, _ = cut.pipeline(inputs, counted=False)
    cut.remove_plans()
    return made
