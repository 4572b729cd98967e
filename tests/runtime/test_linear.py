"""Linear layers that leave their products to the second half: the bits of a whole backward, whatever calls them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from evenpipe.runtime.linear import LinearGradients
from evenpipe.runtime.stage import Edges, ModuleStage
from evenpipe.runtime.weight_gradients import MARK
from evenpipe.schedule import FORWARD, Unit

WIDTH, ROWS = 24, 5
SHAPE = (2, ROWS, WIDTH)
UNITS = [Unit(0), Unit(1), Unit(2)]


class Chunk(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm, self.position = nn.LayerNorm(WIDTH), nn.Parameter(torch.randn(ROWS, WIDTH))
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.to(dtype)

    def block(self, value: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.second(functional.gelu(self.first(value)))) + value)


class Doubled(torch.autograd.Function):
    """A function of the user's with a backward of its own."""

    @staticmethod
    def forward(ctx, value):
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Leaving(torch.autograd.Function):
    """A product with a weight, which it leaves for the second half where there is one."""

    @staticmethod
    def forward(ctx, value, weight):
        ctx.weight = weight
        ctx.save_for_backward(value)
        return value @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        tensors = [*ctx.saved_tensors, gradient]
        halves = getattr(ctx.weight, MARK, None)
        if halves is None:
            return gradient @ ctx.weight, Leaving.product(*tensors)
        halves.add(ctx.weight, tensors, Leaving.product)
        return gradient @ ctx.weight, None

    @staticmethod
    def product(value, gradient):
        return gradient.flatten(0, 1).t() @ value.flatten(0, 1)


def transposed(chunk: Chunk, value: Tensor) -> Tensor:
    return chunk.first(chunk.block(value).transpose(0, 1)).transpose(0, 1)


def autocast(chunk: Chunk, value: Tensor, caches: bool = True) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=caches):
        return chunk.first(chunk.second(chunk.first(chunk.first(value) + chunk.second(value)))).to(value.dtype)


def autocast_apart(chunk: Chunk, value: Tensor) -> Tensor:
    for _ in range(2):
        value = autocast(chunk, value) + chunk.first(value)
    return value


def embedded(chunk: Chunk, value: Tensor) -> Tensor:
    found = functional.embedding(torch.arange(ROWS).expand(2, ROWS), chunk.table)
    return functional.linear(chunk.block(value + found), chunk.table)


def mixed(chunk: Chunk, value: Tensor) -> Tensor:
    """Three uses of one weight, one of which is a vector's."""
    found = chunk.first(chunk.first(value))
    return found + chunk.first(found[0, 0])


def compiled(chunk: Chunk, value: Tensor) -> Tensor:
    def part(value: Tensor) -> Tensor:
        return chunk.norm(torch.tanh(chunk.first(value)))

    return chunk.second(torch.compile(part, backend="aot_eager", fullgraph=True)(chunk.second(value)))


def compiled_by(
    compute: Callable[[Chunk, Tensor], Tensor], backend: str = "aot_eager", **given: bool
) -> Callable[[Chunk, Tensor], Tensor]:
    return torch.compile(compute, backend=backend, fullgraph=True, **given)


CASES: dict[str, Callable[[Chunk, Tensor], Tensor]] = {
    "layers": lambda chunk, value: chunk.block(value),
    "thrice": lambda chunk, value: chunk.first(chunk.second(chunk.first(chunk.first(value)))),
    "in place": lambda chunk, value: chunk.first(value).relu_(),
    "a view in place": lambda chunk, value: chunk.first(value).flatten().relu_().view(SHAPE),
    "checkpoint": lambda chunk, value: checkpoint(chunk.block, chunk.block(value), use_reentrant=False),
    "checkpoints, reentrant": lambda chunk, value: checkpoint(
        chunk.block, checkpoint(chunk.block, chunk.block(value), use_reentrant=True), use_reentrant=True
    ),
    "checkpoints with autocast": lambda chunk, value: checkpoint(
        autocast_apart, chunk, autocast(chunk, value), use_reentrant=False
    ),
    "a function of the user's": lambda chunk, value: chunk.second(Doubled.apply(chunk.first(Doubled.apply(value)))),
    "a function that leaves its product": lambda chunk, value: Leaving.apply(
        chunk.second(Leaving.apply(value, chunk.first.weight)), chunk.first.weight
    ),
    "transposed": transposed,
    "rows of a table": lambda chunk, value: chunk.first(value[:, 1:4]).sum(1, keepdim=True) + chunk.first(value),
    "expanded gradient": lambda chunk, value: chunk.first(chunk.first(value)).sum(0).expand(SHAPE),
    "a vector beside": mixed,
    "four dimensions": lambda chunk, value: chunk.first(chunk.block(value)[None]).squeeze(0),
    "transposed weight": lambda chunk, value: functional.linear(value, chunk.table),
    "column by column": lambda chunk, value: chunk.first(
        chunk.second(value.reshape(-1, WIDTH)).t().contiguous().t()
    ).view(SHAPE),
    "autocast": autocast,
    "autocast without a cache": lambda chunk, value: autocast(chunk, value, caches=False),
    "autocast by parts": autocast_apart,
    "an embedding's weight": embedded,
    "attention": lambda chunk, value: functional.scaled_dot_product_attention(
        chunk.first(value), chunk.second(value), chunk.first(value)
    ),
    "a gradient that is a view": lambda chunk, value: chunk.first(value) + chunk.position.view(1, ROWS, WIDTH),
    "attention of torch's own": lambda chunk, value: functional.multi_head_attention_forward(
        *(value, value, value, WIDTH, 4, None, None, None, None, False, 0.0, chunk.second.weight, None),
        use_separate_proj_weight=True,
        q_proj_weight=chunk.first.weight,
        k_proj_weight=chunk.table,
        v_proj_weight=chunk.second.weight,
    )[0],
    "vmap": lambda chunk, value: torch.vmap(chunk.first)(value),
    "compiled": compiled,
    "compiled as a whole": compiled_by(lambda chunk, value: chunk.block(value)),
    "compiled, the same twice": compiled_by(lambda chunk, value: chunk.first(value) + chunk.first(value)),
    "compiled with a checkpoint": compiled_by(
        lambda chunk, value: functional.linear(checkpoint(chunk.block, value, use_reentrant=False), chunk.table)
    ),
    "compiled in a checkpoint": lambda chunk, value: checkpoint(
        compiled_by(lambda chunk, value: chunk.block(value)), chunk, value, use_reentrant=False
    ),
    "compiled with autocast": compiled_by(lambda chunk, value: autocast(chunk, chunk.block(value), caches=False)),
    "compiled, transposed": compiled_by(transposed),
    "compiled, a vector beside": compiled_by(mixed),
    "compiled, in place": compiled_by(lambda chunk, value: chunk.second(chunk.first(value).relu_()).add_(value)),
    "compiled, transposed weight": compiled_by(lambda chunk, value: functional.linear(value, chunk.table)),
    "compiled vmap": compiled_by(lambda chunk, value: torch.vmap(chunk.first)(value)),
    "keywords": lambda chunk, value: functional.linear(weight=chunk.first.weight, input=value, bias=None),
    "an operation": lambda chunk, value: torch.ops.aten.linear.default(value, chunk.first.weight, chunk.first.bias),
}


class Part(nn.Module):
    def __init__(self, chunk: Chunk, compute: Callable[[Chunk, Tensor], Tensor]) -> None:
        super().__init__()
        self.chunk, self.compute = chunk, compute

    def forward(self, value: Tensor) -> Tensor:
        return self.compute(self.chunk, value)


def gradients(compute, dtype, halves, starts=False, prepare=lambda chunk: None, noted=None):
    """Return the input gradients of three micro-batches, and the summed gradients of the parameters."""
    chunk = Chunk(dtype)
    prepare(chunk)
    edges = Edges.alike(torch.empty(SHAPE, dtype=dtype))
    torch.manual_seed(1)
    given = [torch.randn(SHAPE, dtype=dtype) for _ in UNITS]
    recording = (lambda unit: nullcontext()) if halves else None
    stage = ModuleStage([Part(chunk, compute)], edges, given.__getitem__, None, None, recording)
    for unit in UNITS:
        inputs = None if starts else stage.receive_buffers(FORWARD, unit)
        if inputs is not None:
            with torch.no_grad():
                inputs[0].copy_(given[unit.micro_batch])
        stage.forward(unit, inputs)
    found = []
    upstream = [torch.randn(SHAPE, dtype=dtype) for _ in UNITS]
    for unit in UNITS:
        gradient = [upstream[unit.micro_batch]]
        found += stage.backward_input(unit, gradient) if halves else stage.backward(unit, gradient)
        if noted is not None:
            noted.append({name for name, one in chunk.named_parameters() if one.grad is not None})
    for unit in UNITS if halves else ():
        stage.backward_weight(unit)
    return [*found, *(one.grad for one in chunk.parameters())]


def assert_same(*found: list[Tensor | None]) -> None:
    for number, (ours, theirs) in enumerate(zip(*found, strict=True)):
        assert (ours is None) == (theirs is None), number
        assert ours is None or torch.equal(ours, theirs), number


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("starts", [False, True], ids=["", "at the start of the model"])
@pytest.mark.parametrize("case", CASES)
def test_two_halves_have_the_bits_of_a_whole_backward(case, starts, dtype):
    if starts and case == "checkpoints, reentrant":
        pytest.skip("of an input without a gradient it has none itself")
    torch.compiler.reset()
    assert_same(*(gradients(CASES[case], dtype, halves, starts) for halves in (True, False)))


@pytest.mark.parametrize(
    ("case", "left"),
    [
        *(("layers", {"first", "second"}), ("checkpoint", {"first", "second"}), ("attention", {"first", "second"})),
        *(("checkpoints, reentrant", {"first", "second"}), ("autocast", {"first", "second"}), ("vmap", set())),
        *(("compiled", {"first", "second"}), ("a vector beside", {"first"}), ("transposed", {"first", "second"})),
        *(("an operation", {"first"}), ("a function that leaves its product", {"first", "second"})),
        ("attention of torch's own", set()),
        *((f"compiled {how}", {"first", "second"}) for how in ("as a whole", "in a checkpoint", "with autocast")),
        *(("compiled with a checkpoint", {"table"}), ("compiled, the same twice", {"first"})),
        *(("compiled, a vector beside", {"first"}), ("compiled vmap", set())),
    ],
)
def test_weights_have_no_gradient_before_the_second_half(case, left):
    torch.compiler.reset()
    noted: list[set[str]] = []
    found = gradients(CASES[case], torch.float32, True, noted=noted)
    weights = {"table" if name == "table" else f"{name}.weight" for name in left}
    assert not weights & noted[-1]
    everything = {name for (name, _), one in zip(Chunk().named_parameters(), found[3:], strict=True) if one is not None}
    assert everything - noted[-1] == weights


class Compiled(nn.Module):
    """A part as users have them compiled, of many products of one size: the compiler has memory to use again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.words.weight

    def forward(self, value: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            value = torch.sin(layer(functional.gelu(value))) * value + torch.tanh(value)
        return self.tied(value + self.words(torch.arange(value.shape[-2])))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_part_of_any_length_leaves_its_products_and_has_the_bits_of_the_whole_compiled_one(backend):
    """With shapes that vary, too. Memory that the compiled backward uses again does not change what was left."""

    def run(halves: bool) -> list[Tensor | None]:
        torch.compiler.reset()
        part = Compiled()
        compiled = torch.compile(part, backend=backend, fullgraph=True, dynamic=True)
        of_chunk = LinearGradients(compiled, lambda unit: nullcontext())
        torch.manual_seed(1)
        values = [torch.randn(2, length, WIDTH, requires_grad=True) for length in (5, 9)]
        sums = []
        for value in values:
            with of_chunk.calls if halves else nullcontext():
                sums.append(compiled(value).square().sum())
        hooked: list[bool] = []
        for layer in part.layers:
            layer.weight.register_post_accumulate_grad_hook(lambda weight: hooked.append(weight.grad is not None))
        for number, one in enumerate(sums):
            if halves:
                of_chunk.leave(Unit(number), lambda one=one: one.backward() or [])
                assert all(layer.weight.grad is None for layer in part.layers)
                assert not any(hooked)  # as torch calls them where an autograd Function returns None
            else:
                one.backward()
        for number in range(len(sums)) if halves else ():
            of_chunk.compute(Unit(number))
        assert sum(hooked) == len(sums) * len(part.layers)
        return [*(one.grad for one in values), *(one.grad for one in part.parameters())]

    assert_same(run(True), run(False))


def test_weights_of_another_chunk_in_a_compiled_part_are_named():
    torch.compiler.reset()
    one, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    of_one, _ = (LinearGradients(chunk, lambda unit: nullcontext()) for chunk in (one, other))
    value = torch.randn(2, WIDTH, requires_grad=True)
    with of_one.calls:
        found = torch.compile(other, backend="aot_eager")(value).sum()
    with pytest.raises(RuntimeError, match="a compiled part was traced with weights of its own, and runs with those"):
        of_one.leave(Unit(0), lambda: found.backward() or [])


@pytest.mark.parametrize("frozen", ["first", "second", "norm"])
def test_what_is_frozen_has_no_gradient(frozen):
    def freeze(chunk):
        getattr(chunk, frozen).requires_grad_(False)

    assert_same(*(gradients(CASES["layers"], torch.float32, halves, prepare=freeze) for halves in (True, False)))


def test_a_weight_that_is_frozen_later_has_no_gradient():
    chunk = Chunk()
    of_chunk = LinearGradients(chunk, lambda unit: nullcontext())
    chunk.first.weight.requires_grad_(False)
    with of_chunk.calls:
        found = chunk.block(torch.randn(SHAPE)).sum()
    of_chunk.leave(UNITS[0], lambda: found.backward() or [])
    of_chunk.compute(UNITS[0])
    assert chunk.first.weight.grad is None
    assert chunk.second.weight.grad is not None


def test_a_weight_that_lies_the_other_way_round_has_the_same_bits():
    def lay(chunk):
        chunk.table = nn.Parameter(torch.randn(WIDTH, WIDTH).t())

    compute = CASES["transposed weight"]
    assert_same(*(gradients(compute, torch.float32, halves, prepare=lay) for halves in (True, False)))


def test_a_weight_that_something_else_uses_too_differs_by_rounding():
    def compute(chunk: Chunk, value: Tensor) -> Tensor:
        return functional.linear(chunk.block(value), chunk.table) @ chunk.table

    ours, theirs = (gradients(compute, torch.float32, halves) for halves in (True, False))
    torch.testing.assert_close(ours, theirs)
    table = [name for name, _ in Chunk().named_parameters()].index("table") + len(UNITS)
    assert_same(*([*found[:table], *found[table + 1 :]] for found in (ours, theirs)))


def test_a_weight_of_two_chunks_has_its_gradient_in_the_first_half():
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    assert [weight.dim() for weight in LinearGradients(one, lambda unit: nullcontext(), [one, other]).weights] == [1]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", ["tensor", "torch.autograd"])
def test_a_backward_may_be_called_in_any_way_also_where_it_computes_again(way, reentrant):
    """Within an outer checkpoint, an inner one computes again when the outer one's backward does."""

    def run(halves):
        chunk = Chunk()
        of_chunk = LinearGradients(chunk, lambda unit: nullcontext())
        torch.manual_seed(1)
        value = torch.randn(SHAPE, requires_grad=True)

        def inner(value):
            return checkpoint(chunk.block, value, use_reentrant=reentrant)

        with of_chunk.calls if halves else nullcontext():
            found = checkpoint(inner, value, use_reentrant=reentrant).square().sum()
        call = found.backward if way == "tensor" else lambda: torch.autograd.backward(found)
        if halves:
            of_chunk.leave(UNITS[0], lambda: call() or [])
            assert chunk.first.weight.grad is None
            of_chunk.compute(UNITS[0])
        else:
            call()
        return [value.grad, *(one.grad for one in chunk.parameters())]

    assert_same(run(True), run(False))


def test_a_backward_inside_of_a_forward_is_named():
    def compute(chunk, value):
        (found,) = torch.autograd.grad(chunk.first(value).sum(), value, create_graph=True)
        return found

    with pytest.raises(
        RuntimeError, match=r"a backward outside of the schedule .*: take a schedule of whole backwards"
    ):
        gradients(compute, torch.float32, True)
