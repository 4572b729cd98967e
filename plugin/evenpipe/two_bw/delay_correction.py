"""Cures of 2BW's delay: gradients are taken at weights that lie ahead of those that the optimizer steps.

The step of batch t is s(t): W(t+1) = W(t) - s(t), with gradients at V(t-1), for V(t) = W(t) - γ·s(t-1); 2BW itself is
γ = 0. W(t) is what a gradient at V(t-1) is used on, and W(t-1) - s(t-2) is W(t), but for how far a step differs from
the one before. So γ = 1 takes gradients where they are used, up to the difference of two steps.

Error feedback is the same rule seen from V: V(t+1) = V(t) - s(t) - γ·(s(t) - s(t-1)). With γ = 1, a batch's step adds
the error of the one before, which was made with a gradient that came too early: s(t) is the step from V(t-1) on, for
which s(t-1) had to stand. It is derived here, from the delay of one batch; no paper's equations are followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from evenpipe.runtime.weight_versions import WeightVersions

__all__ = ["Correction", "ErrorFeedback", "WeightPrediction", "correction_of", "momentum_of"]


class Correction(Protocol):
    """Stands around the steps of one stage."""

    #: The value of the setting.
    name: str
    #: What it keeps from step to step.
    nbytes: int
    #: Whether a process keeps what its own optimizer steps, and not what all replicas have alike.
    own: bool

    def stepping(self) -> Any:
        """A context in which the optimizer steps, and the newest version is written."""

    def show(self) -> None:
        """Have parameters be the optimizer's weights W, for evaluation and saving. Nothing to do twice."""

    def hide(self) -> None:
        """Have parameters be V again, for training."""

    def state(self) -> list[Tensor]:
        """Return, after `show`, what a checkpoint needs; tensors that change later."""

    def restart(self, state: Sequence[Tensor] | None) -> None:
        """Go on from `state`; None: begin anew, without a step before. Raises ValueError for another shape."""


class WeightPrediction:
    """Forwards run ahead: the model's own weights are V, and W, by which the optimizer goes, is kept beside them.

    As SpecTrain and XPipe do, by the optimizer's last step, with `ahead` = γ: 1, or the momentum for a look-ahead as
    Nesterov's. It does not matter what steps, or where it keeps masters, but V has the precision of the weights.
    """

    own = False

    def __init__(self, name: str, versions: WeightVersions, ahead: Callable[[], float]) -> None:
        self.name = name
        self._versions = versions
        self._ahead = ahead
        self._others = [tensor.clone() for tensor in self._newest]  # W, and V where parameters are W
        self._shown = True
        self.nbytes = sum(tensor.nbytes for tensor in self._others)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        # The version that is written began as a copy of V.
        for tensor, other in zip(self._newest, self._others, strict=True):
            tensor.copy_(other)
        yield
        for tensor, other in zip(self._newest, self._others, strict=True):
            _look_ahead(tensor, other, self._ahead())

    def show(self) -> None:
        if not self._shown:
            self._exchange()

    def hide(self) -> None:
        if self._shown:
            self._exchange()

    def state(self) -> list[Tensor]:
        assert self._shown, "it is asked for after a drain"
        return self._others

    def restart(self, state: Sequence[Tensor] | None) -> None:
        _fill(self._others, self._newest if state is None else state)
        self._shown = True

    @property
    def _newest(self) -> list[Tensor]:
        return self._versions.trained(self._versions.latest)

    def _exchange(self) -> None:
        for tensor, other in zip(self._newest, self._others, strict=True):
            value = tensor.clone()
            tensor.copy_(other)
            other.copy_(value)
        self._shown = not self._shown


#: Attributes of optimizers that have masters of their own: Transformer Engine's FusedAdam, Megatron's for the host.
_OWN_MASTERS: Final = ("master_weights", "param_update_in_fp32")


class ErrorFeedback:
    """Steps feed back the error of the one before: what torch's `optimizers` step are V, or masters of it.

    W is kept beside them, in their type and in their shards. All that a framework makes of its masters is V too.
    """

    name = "error-feedback"
    own = True

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            if not hasattr(optimizer, "register_step_pre_hook"):
                raise ValueError(
                    f"2bw: error-feedback corrects what torch's optimizers step, in their hooks, and "
                    f"{type(optimizer).__name__} has none: use weight-prediction"
                )
            if any(getattr(optimizer, name, False) for name in _OWN_MASTERS):
                raise ValueError(
                    f"2bw: error-feedback corrects masters, which {type(optimizer).__name__} keeps in its own state, "
                    "in part or on the host: use weight-prediction"
                )
        self._optimizers = list(optimizers)
        stepped = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
        self._stepped = list({id(one): one for one in stepped}.values())
        self._others = [one.detach().clone() for one in self._stepped]  # W
        self._other_of = {id(one): other for one, other in zip(self._stepped, self._others, strict=True)}
        self.nbytes = sum(tensor.nbytes for tensor in self._others)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for optimizer in self._optimizers:
                hooks.callback(optimizer.register_step_pre_hook(self._before).remove)
                hooks.callback(optimizer.register_step_post_hook(self._after).remove)
            yield

    def show(self) -> None:
        """Nothing: V is what is trained, evaluated and saved."""

    def hide(self) -> None:
        """Nothing."""

    def state(self) -> list[Tensor]:
        return self._others

    def restart(self, state: Sequence[Tensor] | None) -> None:
        _fill(self._others, self._stepped if state is None else state)

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for one, other in self._pairs(optimizer):
            one.copy_(other)

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for one, other in self._pairs(optimizer):
            _look_ahead(one, other, 1.0)

    def _pairs(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
        """Of the groups that are stepped now: ZeRO steps one after the other."""
        return ((one.detach(), self._other_of[id(one)]) for group in optimizer.param_groups for one in group["params"])


def correction_of(
    name: str,
    versions: WeightVersions,
    param_groups: Callable[[], Sequence[Mapping[str, Any]]],
    optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
) -> Correction | None:
    """Return the correction of that name, for one stage; None for "none".

    Raises ValueError for one that the optimizer has nothing for.
    """
    if name == "error-feedback":
        return ErrorFeedback(optimizers())
    if name == "weight-prediction":
        return WeightPrediction(name, versions, lambda: 1.0)
    if name == "nesterov":
        momentum_of(param_groups())
        return WeightPrediction(name, versions, lambda: momentum_of(param_groups()))
    return None


def momentum_of(groups: Sequence[Mapping[str, Any]]) -> float:
    """Return the smallest momentum of an optimizer's groups, by any of the names for it.

    Raises ValueError where there is none.
    """
    found = [_momentum(group) for group in groups]
    if not found or min(found) <= 0:
        raise ValueError(
            "2bw: nesterov looks ahead by the optimizer's momentum, and a group of it has none (betas, momentum or "
            "momentum_beta): use weight-prediction, or error-feedback"
        )
    return min(found)


_NAMES: Final = ("momentum", "momentum_beta")


def _momentum(group: Mapping[str, Any]) -> float:
    if "betas" in group:
        return float(group["betas"][0])
    return float(next((group[name] for name in _NAMES if name in group), 0.0))


def _look_ahead(stepped: Tensor, before: Tensor, ahead: float) -> None:
    """`stepped` is W(t+1), and `before` W(t): make V(t+1) of the one, and W(t+1) of the other."""
    step = stepped - before
    before.copy_(stepped)
    stepped.add_(step, alpha=ahead)


def _fill(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if [tensor.shape for tensor in tensors] != [value.shape for value in values]:
        raise ValueError("the delay correction in the checkpoint has other shapes than this process' weights")
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value.detach())
