"""The models of train_tiny in plain PyTorch, one process: W(t+1) = W(t) - step of the gradients at W(t-1)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from shards import SHARDS, project_sharded
from torch import Tensor, nn
from train_tiny import Case, digest, layers, loss_of, project

from tests.oracle.recurrence import TwoBWUpdates

__all__ = ["train_two_bw"]


class _Model:
    """The layers, by the names that PipelineModule gives them; the two ends of a tied embedding have a copy each."""

    def __init__(self, case: Case, parts: Sequence[int]) -> None:
        self.named: list[tuple[int, str, nn.Parameter]] = []
        self.ties: list[list[nn.Parameter]] = []  # both ends of each tied weight
        self._layers: list[Any] = []
        for number, spec in enumerate(layers(case)):
            torch.manual_seed(7 + number)
            name, layer = str(number), spec.build()
            if (case.tied or case.sharded) and number in (0, case.blocks + 1):
                name = "tied_modules.embedding"
                ends = list(layer.weight) if case.sharded else [layer.weight]
                for (first, *_), end in zip(self.ties, ends, strict=False):
                    end.data = first.detach().clone()  # and not the rest of the layer
                self.ties = [[*tie, end] for tie, end in zip(self.ties or [[]] * len(ends), ends, strict=True)]
            layer.to(_precision(case.config))
            self._layers.append(layer)
            stage = sum(number >= start for start in parts[1:-1])
            self.named += [(stage, f"{name}.{part}", weight) for part, weight in layer.named_parameters()]
        self.shards = SHARDS if case.sharded else 1
        if case.tied or case.sharded:
            self._last: Any = functools.partial(project_sharded if case.sharded else project, self._layers[-1])
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


def train_two_bw(
    case: Case,
    sources: Sequence[Iterator[Any]],
    parts: Sequence[int],
    rates: Sequence[float],
    changes: int | None,
    evaluated: Sequence[str],
) -> dict[str, Any]:
    """Losses and weights of a run with these learning rates, and which of its steps are skipped.

    `sources` has the micro-batches of each replica; after `case.steps`, a batch has `changes` of them.
    """
    model = _Model(case, parts)
    wanted = case.config["optimizer"]
    given = {name: value for name, value in wanted["params"].items() if name != "torch_adam"}
    masters = [nn.Parameter(weight.detach().float().clone()) for weight in model.parameters]
    kind = torch.optim.AdamW if wanted["type"] == "Adam" else torch.optim.SGD
    optimizer = kind(masters, **given)
    correction = case.config["evenpipe"].get("delay_correction", "none")
    updates = TwoBWUpdates(optimizer, 1, 0.0 if correction == "none" else 1.0)
    if "fp16" in case.config and "zero_optimization" not in case.config:
        # DeepSpeed has a first step make the optimizer's state, and does not tell the weights of it.
        for master in masters:
            master.grad = torch.zeros_like(master)
        optimizer.step()
    micro_batches: int = case.config.get("gradient_accumulation_steps", 8)
    # DeepSpeed adds gradients up in the parameters' dtype where nothing else is asked for, and always reduces in it.
    told_in = _precision(case.config)
    added_in = torch.float32 if "data_types" in case.config else told_in
    scale = _LossScale(case.config.get("fp16"))
    scales: list[float] = []
    losses, others, skipped = [], [], []
    for step, rate in enumerate(rates):
        count = changes if changes is not None and step >= case.steps else micro_batches
        scales.append(scale.after(skipped[: max(0, step - 1)]))  # a step is finished after the next batch has begun
        model.load(updates.seen)
        found = [_batch(model, source, count, added_in, scales[-1]) for source in sources]
        losses.append(_mean([loss for loss, _ in found]))
        gradients = [
            _mean([one.to(told_in) for one in each]).to(added_in)
            for each in zip(*(one for _, one in found), strict=True)
        ]
        _tie(model, gradients)
        squares = _squares(model, gradients, _sharded(case.config))
        skipped.append(not math.isfinite(squares) and _looks(case.config))
        if skipped[-1]:
            updates.skip()
        else:
            updates.update(_clipped(gradients, math.sqrt(squares), scales[-1], case.config), rate)
        if evaluated:
            model.load(updates.foremost if correction == "error-feedback" else updates.newest)
            with torch.no_grad():
                others.append(_mean([_batch(model, source, count, None)[0] for source in sources]))
    model.load(updates.foremost if correction == "error-feedback" else updates.newest)
    scales.append(scale.after(skipped[:-1]))
    return {
        "losses": [float(loss).hex() for loss in losses],
        "evaluated": [float(loss).hex() for loss in others],
        # A process names the shard that it has as if it were the only one.
        "weights": [
            [name.removesuffix(".1") + ".0" * name.endswith(".1"), digest(weight)] for _, name, weight in model.named
        ],
        "skipped": skipped,
        "scales": scales,
    }


class _LossScale:
    """DeepSpeed's in fp16, without hysteresis: halved after an overflow, doubled after a window without one."""

    def __init__(self, settings: dict[str, Any] | None) -> None:
        self._settings = settings or {"loss_scale": 1}
        self._dynamic = self._settings["loss_scale"] == 0

    def after(self, skipped: Sequence[bool]) -> float:
        """When these steps have been made or skipped."""
        if not self._dynamic:
            return float(self._settings["loss_scale"])
        scale, last = 2.0 ** self._settings["initial_scale_power"], -1
        for step, overflow in enumerate(skipped):
            since = step - last - 1
            if overflow:
                scale, last = scale / 2, step
            elif since > 0 and since % self._settings["loss_scale_window"] == 0:
                scale *= 2
        return scale


def _precision(config: dict[str, Any]) -> torch.dtype:
    return torch.bfloat16 if "bf16" in config else torch.float16 if "fp16" in config else torch.float32


def _sharded(config: dict[str, Any]) -> bool:
    """Whether the optimizer is DeepSpeed's for ZeRO, and not that for bf16 with fp32 gradients."""
    return "zero_optimization" in config and "data_types" not in config


def _looks(config: dict[str, Any]) -> bool:
    """Whether DeepSpeed looks for gradients that are no numbers: always, but for one of torch's optimizers."""
    return "bf16" in config or "fp16" in config or "zero_optimization" in config


def _batch(
    model: _Model, source: Any, count: int, added_in: torch.dtype | None, scale: float = 1.0
) -> tuple[Tensor, list[Tensor]]:
    """The mean loss of the next micro-batches, and their gradients, added up in this dtype (None: without)."""
    total = torch.zeros(())
    sums = [torch.zeros_like(weight, dtype=added_in) for weight in model.parameters]
    for tokens, labels in islice(source, count):
        loss = loss_of(model(tokens), labels)
        total += loss.detach()
        if added_in is not None:
            (loss / count * scale).backward()
            for weight, added in zip(model.parameters, sums, strict=True):
                if weight.grad is not None:
                    added += weight.grad
                weight.grad = None
    return total / count, sums


def _mean(values: list[Tensor]) -> Tensor:
    return sum(values[1:], values[0]) / len(values)


def _tie(model: _Model, gradients: list[Tensor]) -> None:
    for tie in model.ties:
        places = [place for place, weight in enumerate(model.parameters) if any(weight is end for end in tie)]
        together = gradients[places[0]] + gradients[places[1]]
        for place in places:
            gradients[place] = together.clone()


def _squares(model: _Model, gradients: list[Tensor], sharded: bool) -> float:
    """The squared norm over all ranks, each of which tells its part; of a tied weight, the first end is counted.

    A weight that all shards have is counted by the first of them, and nothing in its place by the others.
    """
    copies = [end for _, *others in model.ties for end in others]
    told_in = torch.float64 if sharded else torch.float32
    norms: dict[tuple[int, int], list[Tensor]] = {}
    for (stage, _, weight), gradient in zip(model.named, gradients, strict=True):
        norm = torch.linalg.vector_norm(gradient, dtype=told_in)
        for shard in range(model.shards) if not any(weight is one for one in copies) else ():
            own = getattr(weight, "shard", None)
            if own in (None, shard):
                norms.setdefault((stage, shard), []).append(norm * 0 if own is None and shard > 0 else norm)
    of_ranks = [norms[rank] for rank in sorted(norms)]
    if sharded:  # DeepSpeed adds up a rank's itself, and tells it in fp32
        return sum(torch.stack(one).square().sum().float().sqrt().item() ** 2 for one in of_ranks)
    return sum(torch.stack(one).double().square().sum().item() for one in of_ranks)


def _clipped(gradients: list[Tensor], norm: float, scale: float, config: dict[str, Any]) -> list[Tensor]:
    """The gradients as DeepSpeed's optimizer for this precision has them for its step, in fp32."""
    most = config.get("gradient_clipping", 0.0)
    told = torch.tensor(norm)
    if "fp16" in config or _sharded(config):
        wide = [gradient.float() for gradient in gradients]
        if not most:
            divisor: Any = scale
        elif "zero_optimization" in config:
            divisor = torch.clamp((told / scale + 1e-6) / most, min=1.0) * scale
        else:
            divisor = max((norm / scale + 1e-6) / most, 1.0) * scale
        return [gradient.mul_(1.0 / divisor) for gradient in wide]
    if most:
        told = told.square().sqrt() if "bf16" in config else told
        factor = most / (told + 1e-6)
        for gradient in gradients if factor < 1 or factor.isnan() else ():
            gradient.mul_(factor)
    return [gradient.float() for gradient in gradients]
