"""The models of train_tiny in plain PyTorch, one process: W(t+1) = W(t) - step of the gradients at W(t-1)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from train_tiny import Case, batches, digest, layers, loss_of, project

from tests.oracle.recurrence import DelayedUpdates

__all__ = ["train_delayed"]


class _Model:
    """The layers, by the names that PipelineModule gives them; the two ends of a tied embedding have a copy each."""

    def __init__(self, case: Case, parts: Sequence[int]) -> None:
        self.named: list[tuple[int, str, nn.Parameter]] = []
        self.tied: list[nn.Parameter] = []
        self._layers: list[Any] = []
        for number, spec in enumerate(layers(case)):
            torch.manual_seed(7 + number)
            name, layer = str(number), spec.build()
            if case.tied and number in (0, case.blocks + 1):
                name = "tied_modules.embedding"
                if self.tied:
                    layer.weight.data = self.tied[0].detach().clone()  # and not the rest of it
                self.tied.append(layer.weight)
            layer.to(torch.bfloat16 if "bf16" in case.config else torch.float32)
            self._layers.append(layer)
            stage = sum(number >= start for start in parts[1:-1])
            self.named += [(stage, f"{name}.{part}", weight) for part, weight in layer.named_parameters()]
        if case.tied:
            self._last: Any = functools.partial(project, self._layers[-1])
        else:
            self._last = self._layers[-1]
        self.parameters = [weight for _, _, weight in self.named]

    def __call__(self, tokens: Tensor) -> Tensor:
        x = tokens
        for layer in self._layers[:-1]:
            x = layer(x)
        return self._last(x)

    def load(self, weights: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, weight in zip(self.parameters, weights, strict=True):
                parameter.copy_(weight)


def train_delayed(
    case: Case,
    replicas: int,
    parts: Sequence[int],
    rates: Sequence[float],
    changes: int | None,
    evaluated: Sequence[str],
) -> dict[str, Any]:
    """Losses and weights of a run with these learning rates; after `case.steps`, with `changes` micro-batches."""
    model = _Model(case, parts)
    wanted = case.config["optimizer"]
    given = {name: value for name, value in wanted["params"].items() if name != "torch_adam"}
    masters = [nn.Parameter(weight.detach().float().clone()) for weight in model.parameters]
    kind = torch.optim.AdamW if wanted["type"] == "Adam" else torch.optim.SGD
    updates = DelayedUpdates(kind(masters, **given), 1)
    micro_batches: int = case.config.get("gradient_accumulation_steps", 8)
    sources = [batches(replica, replicas, micro_batches) for replica in range(replicas)]
    # DeepSpeed adds gradients up in the parameters' dtype where nothing else is asked for, and always reduces in it.
    told_in = torch.bfloat16 if "bf16" in case.config else torch.float32
    added_in = torch.bfloat16 if "bf16" in case.config and "data_types" not in case.config else torch.float32
    losses, others = [], []
    for step, rate in enumerate(rates):
        count = changes if changes is not None and step >= case.steps else micro_batches
        model.load(updates.seen)
        found = [_batch(model, source, count, added_in) for source in sources]
        losses.append(_mean([loss for loss, _ in found]))
        gradients = [
            _mean([one.to(told_in) for one in each]).to(added_in)
            for each in zip(*(one for _, one in found), strict=True)
        ]
        _tie(model, gradients)
        _clip(model, gradients, case.config)
        updates.update([gradient.float() for gradient in gradients], rate)
        if evaluated:
            model.load(updates.newest)
            with torch.no_grad():
                others.append(_mean([_batch(model, source, count, None)[0] for source in sources]))
    model.load(updates.newest)
    return {
        "losses": [float(loss).hex() for loss in losses],
        "evaluated": [float(loss).hex() for loss in others],
        "weights": [[name, digest(weight)] for _, name, weight in model.named],
    }


def _batch(model: _Model, source: Any, count: int, added_in: torch.dtype | None) -> tuple[Tensor, list[Tensor]]:
    """The mean loss of the next micro-batches, and their gradients, added up in this dtype (None: without)."""
    total = torch.zeros(())
    sums = [torch.zeros_like(weight, dtype=added_in) for weight in model.parameters]
    for tokens, labels in islice(source, count):
        loss = loss_of(model(tokens), labels)
        total += loss.detach()
        if added_in is not None:
            (loss / count).backward()
            for weight, added in zip(model.parameters, sums, strict=True):
                if weight.grad is not None:
                    added += weight.grad
                weight.grad = None
    return total / count, sums


def _mean(values: list[Tensor]) -> Tensor:
    return sum(values[1:], values[0]) / len(values)


def _tie(model: _Model, gradients: list[Tensor]) -> None:
    places = [place for place, weight in enumerate(model.parameters) if any(weight is one for one in model.tied)]
    if places:
        together = gradients[places[0]] + gradients[places[1]]
        for place in places:
            gradients[place] = together.clone()


def _clip(model: _Model, gradients: list[Tensor], config: dict[str, Any]) -> None:
    """In bf16, to the norm over all stages, which is told in fp32."""
    most = config.get("gradient_clipping", 0.0)
    if not most:
        return
    squares = [0.0] * (1 + max(stage for stage, _, _ in model.named))
    for (stage, _, weight), gradient in zip(model.named, gradients, strict=True):
        if not any(weight is one for one in model.tied[1:]):
            squares[stage] += torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square().item()
    told = torch.tensor([math.sqrt(sum(squares))]).norm(2).pow(2).sum().pow(0.5)
    factor = most / (told + 1e-6)
    if factor < 1:
        for gradient in gradients:
            gradient.mul_(factor)
