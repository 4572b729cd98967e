"""Trains what `evenpipe train` trains, by PipeDream-2BW's update rule, in one process and without a schedule."""

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from evenpipe.train import data
from evenpipe.train.options import TrainOptions
from evenpipe.train.run import digest
from tests.oracle.process import Trained
from tests.oracle.recurrence import Biases, TwoBWUpdates, clip, descend, global_norm
from tests.oracle.stages import Stage, build_stages, forward_backward

__all__ = ["train"]


def train(
    options: TrainOptions,
    delay: int,
    norms_added_in: torch.dtype = torch.float64,
    per_token: bool = False,
    largest_norm: float = math.inf,
) -> Trained:
    """Every batch t of `options` runs on W(max(t − delay, 0)) and makes W(t+1) of W(t).

    Needs Megatron's parallel state of one process. Data-parallel replicas run one after the other, and tensor-parallel
    ranks as one, which moves the last bits. `norms_added_in`: see `global_norm`. `per_token`: all tokens of a batch
    count alike in its loss, and not all micro-batches. `largest_norm`: a step beyond it is skipped.
    """
    corpus = data.load(options)
    stages = build_stages(options, corpus)
    parameters = [parameter for stage in stages for parameter in stage.parameters]
    losses: list[float] = []
    norms: list[float] = []

    of_stages = [[part for part in stage.module.modules() if hasattr(part, "expert_bias")] for stage in stages]
    routers = [router for of_stage in of_stages for router in of_stage]
    kept = 1 if options.in_place else delay
    biased = [[Biases(one, kept) for one in of_stage if one.expert_bias is not None] for of_stage in of_stages]
    biases = [bias for of_stage in biased for bias in of_stage]

    def route(place: int, older: bool) -> None:
        for bias in biased[place]:
            bias.use(0 if older else -1)

    def gradients(batch: int, weights: list[Tensor]) -> list[Tensor] | None:
        with torch.no_grad():
            for parameter, value in zip(parameters, weights, strict=True):
                parameter.copy_(value)
        for bias in biases:
            bias.start_batch()
        for router in routers:
            if router.global_tokens_per_expert is not None:
                router.reset_global_aux_loss_tracker()
        loss, found, tokens = _over_replicas(stages, options, corpus, batch, per_token, updates.before, route)
        losses.append(loss)
        for bias in biases:
            bias.end_batch()
        _tie(stages, found)
        if per_token:
            for gradient in (gradient for own in found for gradient in own):
                gradient.mul_(1.0 / tokens)
        counted = [_counted(stage, own) for stage, own in zip(stages, found, strict=True)]
        norms.append(global_norm(counted, norms_added_in))
        if norms[-1] > largest_norm:
            return None
        together = [gradient for own in found for gradient in own]
        if options.clip_grad > 0:
            clip(together, norms[-1], options.clip_grad)
        return together

    optimizer = _optimizer(stages, options)
    updates = TwoBWUpdates(optimizer, delay, _ahead(options.delay_correction, optimizer))
    last = descend(updates, gradients, [_learning_rate(options, batch) for batch in range(options.iterations)])
    if options.delay_correction == "error-feedback":
        last = updates.foremost
    with torch.no_grad():
        for parameter, value in zip(parameters, last, strict=True):
            parameter.copy_(value)
    return Trained(tuple(losses), tuple(norms), _digest(stages, options), [_arrays(stage.module) for stage in stages])


def _over_replicas(
    stages: Sequence[Stage],
    options: TrainOptions,
    corpus: data.Corpus,
    batch: int,
    per_token: bool,
    before: Sequence[Tensor],
    route: Callable[[int, bool], None],
) -> tuple[float, list[list[Tensor]], Tensor]:
    """Loss and gradients (per stage) of a batch, each the mean over data-parallel replicas, and the number of tokens.

    `per_token`: gradients are sums.
    """
    count = options.data_parallel
    of_stages = iter(before)
    older = [[next(of_stages) for _ in stage.parameters] for stage in stages] if options.in_place else None
    found = [
        forward_backward(stages, options, corpus.micro_batches(batch, replica), per_token, older, route)
        for replica in range(count)
    ]
    losses, gradients, tokens = zip(*found, strict=True)
    share = 1 if per_token else count
    mean = [
        [sum((gradient / share for gradient in one[1:]), one[0] / share) for one in zip(*of_stage, strict=True)]
        for of_stage in zip(*gradients, strict=True)
    ]
    return sum(losses) / count, mean, torch.tensor(sum(tokens), dtype=torch.int)


def _tie(stages: Sequence[Stage], gradients: Sequence[Sequence[Tensor]]) -> None:
    """Tied embeddings: both copies get the sum of the first stage's gradient and the last one's."""
    first, last = stages[0], stages[-1]
    if not last.holds_copy:
        return
    one = gradients[0][_position(first.parameters, first.embedding)]
    other = gradients[-1][_position(last.parameters, last.embedding)]
    one.add_(other)
    other.copy_(one)


def _counted(stage: Stage, gradients: Sequence[Tensor]) -> list[Tensor]:
    """The gradients that the norm counts: the copy of an embedding is counted where the embedding is."""
    left_out = _position(stage.parameters, stage.embedding) if stage.holds_copy else None
    return [gradient for position, gradient in enumerate(gradients) if position != left_out]


def _position(parameters: Sequence[nn.Parameter], wanted: nn.Parameter) -> int:
    return next(position for position, parameter in enumerate(parameters) if parameter is wanted)


def _optimizer(stages: Sequence[Stage], options: TrainOptions) -> torch.optim.Optimizer:
    """With the newest weights for its parameters: copies of the stages' weights in fp32, in their order."""
    groups = [
        {"params": [nn.Parameter(parameter.detach().clone().float()) for parameter in group], "weight_decay": decay}
        for stage in stages
        for group, decay in ((stage.decayed, options.weight_decay), (stage.plain, 0.0))
    ]
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum)
    return torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.999), eps=1e-8)


def _ahead(correction: str, optimizer: torch.optim.Optimizer) -> float:
    """By how many steps weights are ahead where gradients are taken: the momentum, under a look-ahead of Nesterov's."""
    if correction == "nesterov":
        return min(group["betas"][0] if "betas" in group else group["momentum"] for group in optimizer.param_groups)
    return {"none": 0.0, "error-feedback": 1.0, "weight-prediction": 1.0}[correction]


def _learning_rate(options: TrainOptions, batch: int) -> float:
    """In iteration i = batch + 1 of n: lr · i / warmup, then constant or a cosine down to a tenth of lr at i = n."""
    iteration, warmup = batch + 1, options.lr_warmup
    if iteration <= warmup:
        return options.lr * iteration / warmup
    if options.lr_decay == "none":
        return options.lr
    least = 0.1 * options.lr
    gone = (iteration - warmup) / (options.iterations - warmup)
    return least + 0.5 * (math.cos(math.pi * gone) + 1.0) * (options.lr - least)


def _digest(stages: Sequence[Stage], options: TrainOptions) -> str:
    """As a run's: each process' parameters by the names that the wrappers for data parallelism and bf16 give them."""
    each = []
    for stage in stages:
        wrapped: nn.Module = nn.ModuleDict({"module": stage.module})
        each.append(digest([wrapped if options.precision == "fp32" else nn.ModuleDict({"module": wrapped})]))
    return hashlib.sha256("".join(each).encode()).hexdigest()


def _arrays(module: nn.Module) -> dict[str, npt.NDArray[np.float32]]:
    return {name: parameter.detach().float().numpy().copy() for name, parameter in module.named_parameters()}
