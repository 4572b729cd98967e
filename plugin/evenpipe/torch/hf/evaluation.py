"""The metrics of an evaluation: transformers' `compute_metrics` for what all last stages return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from evenpipe.partition.models import ModelError
from evenpipe.torch.hf.batches import IGNORED, Batch
from evenpipe.torch.hf.loading import transformers
from evenpipe.torch.replicas import Groups

__all__ = ["Compute", "Metrics"]

#: Returns metrics by name for an `EvalPrediction`; with `batch_eval_metrics` of batch after batch.
Compute = Callable[..., Mapping[str, Any]]
_PREFIX: Final = "eval_"


class Metrics:
    """Collects an evaluation's predictions and labels on the host of one rank, calls `compute` there, tells all ranks.

    That rank is the last stage of the first pipeline. Predictions are what the last stage computes of the model's
    outputs with an entry a sample, but for `config.keys_to_ignore_at_inference`. Each batch's go to the host at once,
    so that `eval_accumulation_steps` changes nothing. All ranks make it, and call its methods, alike.
    """

    def __init__(
        self, compute: Compute, preprocess: Callable[[Any, Any], Any] | None, args: Any, model: nn.Module, ranks: Groups
    ) -> None:
        self._compute, self._preprocess, self._ranks = compute, preprocess, ranks
        self._by_batch = args.batch_eval_metrics
        self._label_names = args.label_names or ["labels"]
        self._config: Any = model.config
        self._utilities: Any = transformers().trainer_pt_utils
        container = partial(self._utilities.EvalLoopContainer, args.eval_do_concat_batches, padding_index=IGNORED)
        self._predictions, self._labels = container(), container()
        self._is_last = ranks.stage == ranks.pipeline.size() - 1
        self._is_here = self._is_last and ranks.replica == 0
        self._found: Mapping[str, Any] = {}
        self._wrong: Exception | None = None

    def add(self, outputs: Mapping[str, Tensor], batch: Batch, samples: int, is_end: bool) -> None:
        """Add a batch of so many `samples`, those that fill it up left out. `outputs`: this replica's.

        Raises ModelError for a batch without labels.
        """
        labels = self._unwrapped([self._cut(one, batch) for one in self._labels_of(batch)])
        if not self._is_last:
            return
        replicas = self._ranks.replicas
        rows = self._rows(batch) // replicas.size()
        ignored = getattr(self._config, "keys_to_ignore_at_inference", ["past_key_values"])
        shown = [one for name, one in outputs.items() if name not in ignored and one.dim() and len(one) == rows]
        if not shown:  # as on all last stages
            self._wrong = ModelError("the last stage computes no output beside the loss")
            return
        predictions: Any = self._unwrapped([self._cut(one, batch) for one in shown])
        if self._preprocess is not None:
            mine = slice(self._ranks.replica * rows, (self._ranks.replica + 1) * rows)
            predictions = self._preprocess(predictions, tree_map(lambda one: one[mine].to(shown[0].device), labels))
        predictions = tree_map(lambda one: one.detach().cpu(), predictions)
        parts: list[Any] | None = [None] * replicas.size() if self._is_here else None
        dist.gather_object(predictions, parts, dst=dist.get_process_group_ranks(replicas)[0], group=replicas)
        if parts is None:
            return
        whole = reduce(partial(self._utilities.nested_concat, padding_index=IGNORED), parts)
        found = [tree_map(lambda one: one[:samples], one) for one in (whole, labels)]
        if self._by_batch:
            self._call(found, compute_result=is_end)
        else:
            self._predictions.add(found[0])
            self._labels.add(found[1])

    def result(self) -> dict[str, float]:
        """Return the metrics, named as `Trainer` names them. Raises ModelError on all ranks where one has failed."""
        made: list[Any] = [None]
        if self._is_here:
            if not self._by_batch:
                self._call([self._predictions.get_arrays(), self._labels.get_arrays()])
            metrics = transformers().trainer_utils.denumpify_detensorize(dict(self._found))
            made = [(metrics, "" if self._wrong is None else f"{type(self._wrong).__name__}: {self._wrong}")]
        dist.broadcast_object_list(made, src=(self._ranks.pipeline.size() - 1) * self._ranks.replicas.size())
        [(metrics, wrong)] = made
        if wrong:
            raise ModelError(f"compute_metrics: {wrong}") from self._wrong
        return {name if name.startswith(_PREFIX) else _PREFIX + name: one for name, one in metrics.items()}

    def _call(self, found: Sequence[Any], **more: Any) -> None:
        if self._wrong is None:
            made = transformers().EvalPrediction(predictions=found[0], label_ids=found[1])
            try:
                self._found = self._compute(made, **more)
            except Exception as error:  # the other ranks wait for whatever it is
                self._wrong = error

    def _labels_of(self, batch: Batch) -> list[Tensor]:
        if missing := [name for name in self._label_names if name not in batch.tensors]:
            raise ModelError(f"compute_metrics: eval_dataset has no {missing[0]}: give them, or name label_names=")
        return [batch.tensors[name] for name in self._label_names]

    def _cut(self, one: Tensor, batch: Batch) -> Tensor:
        """Return the tensor without what its sequences were padded with to the length of a bucket."""
        if batch.length is None or one.dim() < 2 or one.shape[1] != batch.tensors["input_ids"].shape[1]:
            return one
        is_of_classes = one.dim() == 2 and one.shape[1] == getattr(self._config, "num_labels", None)
        return one if is_of_classes else one[:, : batch.length]

    @staticmethod
    def _rows(batch: Batch) -> int:
        return next(len(one) for one in batch.tensors.values() if one.dim())

    @staticmethod
    def _unwrapped(found: Sequence[Tensor]) -> Any:
        """Return the only one, or a tuple of all, as `Trainer` has them."""
        return found[0] if len(found) == 1 else tuple(found)
