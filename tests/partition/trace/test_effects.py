"""Models whose forward does what a graph would not: refused with the user's line, and what is harmless is not."""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from evenpipe.partition.trace import TraceError, trace

CALLS = 0
STEPS = {"step": torch.ones(())}
LOSSES: list[Tensor] = []
CACHED: dict[str, Tensor] = {}


class Rounded(torch.autograd.Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, share: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.share = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.share * gradient, None


class Squared(torch.autograd.Function):
    """Its backward is the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


@torch.library.custom_op("evenpipe_tests::rounded", mutates_args=())
def rounded(x: Tensor) -> Tensor:
    return x.round()


rounded.register_fake(torch.empty_like)
rounded.register_autograd(lambda ctx, gradient: gradient)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls, self.log, self.scale = 0, list[int](), None
        self.step, self.helper, self.seen_last = torch.ones(()), Helper(), torch.ones(())
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x))).square().mean()

    def between(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class StraightThrough(Model):
    def between(self, x: Tensor) -> Tensor:
        return Rounded.apply(x)  # wrong


class Adversarial(Model):
    def between(self, x: Tensor) -> Tensor:
        return Reversed.apply(x, 0.5)  # wrong


class Hooked(Model):
    def between(self, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: -gradient)  # wrong
        return x


class Counted(Model):
    def between(self, x: Tensor) -> Tensor:
        self.calls += 1  # wrong
        return x * self.calls


class Logged(Model):
    def between(self, x: Tensor) -> Tensor:
        self.log.append(len(x))  # wrong
        return x


class CountedForAll(Model):
    def between(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1  # wrong
        return x


class Stepped(Model):
    def between(self, x: Tensor) -> Tensor:
        self.step = self.step + 1  # wrong
        return x / self.step


class SteppedInPlace(Model):
    def between(self, x: Tensor) -> Tensor:
        self.step.add_(1)  # wrong
        return x / self.step


class Averaged(Model):
    def between(self, x: Tensor) -> Tensor:
        self.step.mul_(0.9).add_(x.detach().mean())  # wrong
        return x - self.step


class CountedByItsClass(Model):
    seen = 0

    def between(self, x: Tensor) -> Tensor:
        CountedByItsClass.seen += 1  # wrong
        return x / self.seen


class SteppedInAGlobalTable(Model):
    def between(self, x: Tensor) -> Tensor:
        STEPS["step"] = STEPS["step"] + 1  # wrong
        return x / STEPS["step"]


class LoggedInAGlobalList(Model):
    def between(self, x: Tensor) -> Tensor:
        LOSSES.append(x.detach())  # wrong
        return x


class Helper:
    __slots__ = ("peer", "step")

    def __init__(self) -> None:
        self.step, self.peer = torch.ones(()), self


HELPER = Helper()


class SteppedByAHelper(Model):
    def between(self, x: Tensor) -> Tensor:
        self.helper.step = self.helper.step + 1  # wrong
        return x / self.helper.step


class SteppedByAGlobalHelper(Model):
    def between(self, x: Tensor) -> Tensor:
        HELPER.step = HELPER.step + 1  # wrong
        return x / HELPER.step


def _counting() -> Any:
    calls = 0

    def count(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x / calls

    return count


class CountedInAClosure(Model):
    scaled = staticmethod(_counting())

    def between(self, x: Tensor) -> Tensor:
        return self.scaled(x)


class Drawn(Model):
    def between(self, x: Tensor) -> Tensor:
        return x * random.random()


class Reentrant(Model):
    def between(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, x, use_reentrant=True)  # wrong


class Derived(Model):
    def between(self, x: Tensor) -> Tensor:
        return Squared.apply(x)


class Recomputed(Model):
    def between(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, x, use_reentrant=False)


class MadeOnce(Model):
    def between(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.shape[1] ** -0.5
        return x * self.scale


class TensorMadeOnce(Model):
    def between(self, x: Tensor) -> Tensor:
        if "mask" not in CACHED:
            CACHED["mask"] = self.helper.step = torch.arange(8.0)
        return x * CACHED["mask"] * self.helper.step


class ReplacedUnread(Model):
    """As a layer leaves its loss to the module around it."""

    def between(self, x: Tensor) -> Tensor:
        self.seen_last = x.square().mean()
        return x + self.seen_last


class CountedInABuffer(Model):
    def between(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x * self.count


class Detached(Model):
    def between(self, x: Tensor) -> Tensor:
        return x + (x.round() - x).detach()


class Kept(Model):
    def between(self, x: Tensor) -> Tensor:
        return rounded(x)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (StraightThrough, "Rounded would lose the gradient that it defines"),
        (Adversarial, "Reversed would lose the gradient that it defines"),
        (Hooked, "a hook on a gradient would not be called"),
        (Counted, "calls changes with every forward"),
        (Logged, "log changes with every forward"),
        (CountedForAll, "CALLS changes with every forward"),
        (Stepped, "step changes with every forward"),
        (SteppedInPlace, "step changes with every forward"),
        (Averaged, "step changes with every forward"),
        (CountedByItsClass, "CountedByItsClass.seen changes with every forward"),
        (SteppedInAGlobalTable, "STEPS['step'] changes with every forward"),
        (LoggedInAGlobalList, "LOSSES changes with every forward"),
        (SteppedByAHelper, "helper.step changes with every forward"),
        (SteppedByAGlobalHelper, "HELPER.step changes with every forward"),
        (Reentrant, "what is recomputed would lose its gradient: checkpoint it with use_reentrant=False"),
    ],
)
def test_what_a_graph_would_not_do_is_refused_with_the_users_line(kind: type[Model], reason: str) -> None:
    model = kind()
    with pytest.raises(TraceError) as caught:
        trace(model, {"x": torch.randn(4, 8)})
    source, start = inspect.getsourcelines(kind)
    [number] = [start + offset for offset, line in enumerate(source) if "# wrong" in line]
    message = str(caught.value)
    assert f"{kind.__name__} cannot be traced: {__file__}:{number}: `" in message
    assert reason in message
    assert "\n" not in message
    assert (model.calls, model.log) == (0, [])
    assert (CALLS, CountedByItsClass.seen, LOSSES) == (0, 0, [])
    assert not any(isinstance(one, FakeTensor) for one in (model.step, model.helper.step, HELPER.step, *STEPS.values()))


def test_a_count_in_a_closure_is_refused() -> None:
    with pytest.raises(TraceError, match="calls changes with every forward"):
        trace(CountedInAClosure(), {"x": torch.randn(4, 8)})


def test_random_numbers_that_are_not_torchs_are_refused() -> None:
    with pytest.raises(TraceError, match="forward draws Python's or NumPy's random numbers"):
        trace(Drawn(), {"x": torch.randn(4, 8)})


@pytest.mark.parametrize(
    "kind", [Derived, Recomputed, MadeOnce, TensorMadeOnce, ReplacedUnread, CountedInABuffer, Detached, Kept]
)
def test_what_a_graph_does_as_the_model_is_planned_and_leaves_the_model_as_it_was(kind: type[Model]) -> None:
    model, inputs = kind(), {"x": torch.randn(4, 8)}
    graph = trace(model, inputs)
    assert model.scale is None
    assert model.count == 0
    assert not CACHED
    own = torch.autograd.grad(model(**inputs), list(model.parameters()))
    CACHED.clear()
    with torch.no_grad():
        model.count.zero_()
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    loss = torch.func.functional_call(graph.module, values, (inputs["x"],))
    assert all(map(torch.equal, own, torch.autograd.grad(loss, list(model.parameters()))))


@pytest.mark.parametrize("name", ["Bloom", "Llama", "ViT", "Whisper"])
def test_models_of_transformers_are_planned(name: str) -> None:
    """Bloom's GELU is a Function of its own, whose backward is its derivative."""
    transformers = pytest.importorskip("transformers")
    ids, few = torch.randint(64, (2, 8)), {"vocab_size": 64, "use_cache": False}
    of_encoder = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    of_both = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    audio = {"d_model": 16, "max_source_positions": 8, "max_target_positions": 8, "num_mel_bins": 4}
    tokens = {"pad_token_id": 0, "decoder_start_token_id": 1}
    pixels = {"pixel_values": torch.randn(2, 3, 16, 16)}
    kind, fields, inputs = {
        "Bloom": ("BloomForCausalLM", few | {"hidden_size": 16, "n_layer": 1, "n_head": 2}, {"input_ids": ids}),
        "Llama": ("LlamaForCausalLM", few | of_encoder | {"intermediate_size": 32}, {"input_ids": ids}),
        "ViT": ("ViTForImageClassification", of_encoder | {"image_size": 16}, pixels),
        "Whisper": (
            "WhisperForConditionalGeneration",
            few | of_both | audio | tokens,
            {"input_features": torch.randn(2, 4, 16)},
        ),
    }[name]
    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**fields)).train()
    labels = torch.tensor([0, 1]) if name == "ViT" else ids
    assert trace(model, {**inputs, "labels": labels}).nodes
