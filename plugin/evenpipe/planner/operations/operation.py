"""Operations as one GPU carries them out: their works, their parameters, and the bytes that they keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple, TypeAlias

from evenpipe.descriptions import Model
from evenpipe.planner.quantized import Quantization
from evenpipe.planner.run import Adapted, Graph, Module, Run

__all__ = [
    "Collective",
    "Dispatch",
    "FusedAttention",
    "Gemm",
    "Group",
    "Moved",
    "Operation",
    "Parameters",
    "Pass",
    "Shard",
    "Split",
    "Work",
    "summed",
    "total",
]

#: Over which ranks a collective goes.
Group = Literal["tensor", "context"]


class Gemm(NamedTuple):
    """``batch`` matrix products of (m × k) and (k × n); ``quantized``: with operands as the run quantizes them."""

    m: float
    n: float
    k: float
    batch: float = 1
    quantized: bool = False
    kernels: float = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.batch


class FusedAttention(NamedTuple):
    """Scores, softmax and context in one kernel: operations that are computed, those that a mask spares left out.

    width: of a head's queries.
    """

    flops: float
    width: float
    backward: bool


class Moved(NamedTuple):
    """``nbytes`` that element-wise kernels read and write; ``unfused``: by those of a softmax that is not fused.

    transposing: on top on devices whose products want transposed copies of what is quantized.
    """

    nbytes: float
    kernels: float = 1
    unfused: bool = False
    transposing: float = 0.0


class Collective(NamedTuple):
    """``nbytes`` that each rank sends on the bus of its group, while ``behind`` is computed, if anything.

    cut: step by step, beside a part each of the product that takes or makes them (``--tp-comm-overlap``).
    """

    nbytes: float
    group: Group
    behind: Gemm | None = None
    cut: bool = False


class Dispatch(NamedTuple):
    """Copies of a rank's tokens to their experts' ranks, or back: ``nbytes`` of one copy of all of them.

    chosen: experts of each token; nodes: among how many nodes these are at most, if that is limited.
    """

    nbytes: float
    chosen: int
    nodes: int | None = None


Work: TypeAlias = Gemm | FusedAttention | Moved | Collective | Dispatch


class Parameters(NamedTuple):
    """Numbers of parameters on one GPU: of what every data-parallel rank has, and of experts.

    narrow: of the shared ones, those of linear layers, which a run may quantize, as it may all experts'. adapters: of
    the shared ones, those of LoRA, which then alone are trained.
    """

    shared: float = 0
    expert: float = 0
    narrow: float = 0
    adapters: float = 0

    @property
    def all(self) -> float:
        return self.shared + self.expert

    @property
    def trained(self) -> Parameters:
        """Return LoRA's adapters alone, which are matrices."""
        return Parameters(self.adapters, narrow=self.adapters, adapters=self.adapters)

    def times(self, count: float) -> Parameters:
        shared, expert, narrow, adapters = self
        return Parameters(count * shared, count * expert, count * narrow, count * adapters)


#: Fields of an operation that have works.
Pass = Literal["forward", "backward", "weight_gradient"]


@dataclass(frozen=True, eq=False)
class Operation:
    """Works of one GPU. ``name``: a module of Megatron's, behind a dot one of its operations.

    ``weight_gradient``: the works of the backward that nobody waits for. ``saved_bytes``: kept from forward to
    backward; ``scratch_bytes``: taken while its backward runs. ``module``: whose recomputation carries it out again;
    ``source``: whose recomputation gives what it keeps. ``graph``: which CUDA graph it is in, if these are made.
    """

    name: str
    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    weight_gradient: tuple[Work, ...] = ()
    parameters: Parameters = field(default=Parameters())
    saved_bytes: float = 0
    scratch_bytes: float = 0
    module: Module | None = None
    source: Module | None = None
    graph: Graph | None = None

    def left_bytes(self, run: Run) -> float:
        """Return what the input gradient leaves for the weight gradient: the input, and the output's gradient."""
        products = [work for work in self.weight_gradient if isinstance(work, Gemm)]
        if not products:
            return 0
        return self.saved_bytes + sum(
            run.operand_bytes(work.quantized) * work.batch * work.k * work.n for work in products
        )


def summed(parameters: Iterable[Parameters]) -> Parameters:
    """All of them together."""
    shared, expert, narrow, adapters = Parameters()
    for one in parameters:
        shared, expert = shared + one.shared, expert + one.expert
        narrow, adapters = narrow + one.narrow, adapters + one.adapters
    return Parameters(shared, expert, narrow, adapters)


def total(operations: Iterable[Operation]) -> Parameters:
    """Return the parameters of all of them."""
    return summed(one.parameters for one in operations)


#: Linear layers that Megatron Bridge's adapters are beside, by the name of their operation.
_ADAPTED: Final[Mapping[str, Adapted]] = {
    "qkv": "linear_qkv",
    "projection": "linear_proj",
    "fc1": "linear_fc1",
    "fc2": "linear_fc2",
}
Split = Literal["column", "row"]


@dataclass(frozen=True)
class Shard:
    """A micro-batch of ``run`` of ``model`` on one GPU."""

    model: Model
    run: Run

    @property
    def tokens(self) -> float:
        """Return the tokens of a micro-batch that a tensor-parallel group has."""
        return self.model.sequence * self.run.micro_batch / self.run.context

    @property
    def hidden(self) -> float:
        """Elements of the residual stream that a tensor-parallel group has."""
        return self.tokens * self.model.hidden

    @property
    def residual(self) -> float:
        """Return the elements of the residual stream on one rank: a part under sequence parallelism, otherwise all."""
        return self.hidden / (self.run.tensor if self.run.sequence_parallel else 1)

    def linear(
        self,
        name: str,
        outputs: float,
        inputs: float,
        split: Split | None = None,
        *,
        kept: float | None = None,
        tokens: float | None = None,
        behind_norm: bool = False,
        quantized: bool = True,
    ) -> Operation:
        """y = x W: ``outputs`` and ``inputs`` are this rank's part of W.

        split: "column" takes the whole input, "row" gives a sum over ranks. ``kept``: elements of its input that it
        keeps; all, if left out. ``quantized``: if the run quantizes; ``behind_norm``: a norm makes the input.
        """
        m = self.tokens if tokens is None else tokens
        kept = m * inputs if kept is None else kept
        narrow = self.run.quantization if quantized else None
        made, of_input, of_weight = (
            Gemm(*sizes, quantized=narrow is not None)
            for sizes in ((m, outputs, inputs), (m, inputs, outputs), (inputs, outputs, m))
        )
        whole = inputs if split == "column" else outputs
        forward, backward = self.collectives(split, m * whole, made, of_input, of_weight)
        biases = self.model.hidden if split == "row" else outputs
        weights = outputs * inputs
        found = Operation(
            name,
            (*self.casts(kept, narrow, behind_norm), made, *forward),
            (*self.casts(m * outputs, narrow), of_input, *backward),
            (of_weight,),
            Parameters(weights + (biases if self.model.biases else 0), narrow=weights if quantized else 0),
            saved_bytes=self.run.operand_bytes(made.quantized) * kept,
        )
        return self.frozen(found, m, outputs, inputs, kept) if self.run.lora_rank else found

    def frozen(self, of: Operation, m: float, outputs: float, inputs: float, kept: float) -> Operation:
        """Return the operation without a gradient of its weights, for which it keeps nothing; with LoRA's adapter.

        That is y + B (A x), in the run's precision: x goes through dropout, and the products are added.
        """
        without = replace(of, weight_gradient=(), saved_bytes=0)
        if _ADAPTED.get(of.name) not in self.run.lora_modules:
            return without
        r, e = self.run.lora_rank, self.run.element_bytes
        down, up = Gemm(m, r, inputs), Gemm(m, outputs, r)
        back = Gemm(m, r, outputs), Gemm(m, inputs, r)
        moved = Moved(e * m * (2 * inputs + 3 * outputs), 3)
        return replace(
            without,
            forward=(*of.forward, down, up, moved),
            backward=(*of.backward, *back, moved),
            weight_gradient=(Gemm(inputs, r, m), Gemm(r, outputs, m)),
            parameters=of.parameters._replace(
                shared=of.parameters.shared + r * (inputs + outputs), adapters=r * (inputs + outputs)
            ),
            saved_bytes=e * (kept + m * r),
        )

    def casts(
        self, elements: float, narrow: Quantization | None, behind_norm: bool = False, times: float = 1
    ) -> tuple[Moved, ...]:
        """Return what quantizes so many elements, for the product and for the backward; ``times``: in as many parts."""
        if narrow is None:
            return ()
        fused = narrow.behind_norm_bytes if behind_norm else None
        nbytes = narrow.cast_bytes if fused is None else fused
        return (Moved(nbytes * elements, times * narrow.kernels, transposing=narrow.transposing_bytes * elements),)

    def collectives(
        self,
        split: Split | None,
        elements: float,
        made: Gemm | None = None,
        of_input: Gemm | None = None,
        of_weight: Gemm | None = None,
    ) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
        """Return the collectives of a tensor of so many elements, forward and backward.

        Where the run overlaps collectives, those of the backward run beside the products for the gradients of input and
        weight. With user buffers all others travel beside the product that takes or makes them, in steps, and what a
        quantized product takes is gathered quantized.

        A ring moves (t − 1)/t of a tensor for an all-gather or a reduce-scatter, twice that for an all-reduce. Sequence
        parallelism makes two halves of an all-reduce. It also gathers a column-parallel layer's input again for the
        gradient of its weights (Korthikanti et al. 2022 §4.2.2).
        """
        t = self.run.tensor
        if split is None or t == 1:
            return (), ()
        half = Collective((t - 1) / t * self.run.element_bytes * elements, "tensor")
        whole = half._replace(nbytes=2 * half.nbytes)
        buffers = self.run.user_buffers and made is not None
        if split == "row":
            if not self.run.sequence_parallel:
                return (whole,), ()
            if not buffers:
                return (half,), (half,)
            return (half._replace(behind=made, cut=True),), (half._replace(behind=of_input, cut=True),)
        beside = self.run.overlap_collectives
        if not self.run.sequence_parallel:
            return (), (whole._replace(behind=of_weight if beside else None),)
        gathered = half
        if buffers and made is not None and made.quantized:
            gathered = half._replace(nbytes=half.nbytes / self.run.element_bytes)
        again = gathered._replace(behind=of_input if beside else None)  # for the gradient of the weights
        forward = gathered._replace(behind=made, cut=True) if buffers else gathered
        return (forward,), (again, half._replace(behind=of_weight if beside else None))

    def reduced_rows(self, count: int) -> tuple[Collective, ...]:
        """All-reduces of so many fp32 numbers a token, one after the other."""
        t = self.run.tensor
        return (Collective(2 * (t - 1) / t * 4 * self.tokens, "tensor"),) * count if t > 1 else ()

    def norm(self, name: str, elements: float | None = None, width: float | None = None) -> Operation:
        """Reads and writes all elements; backward also reads the input and adds to the residual's gradient.

        Of each row it keeps the deviation, and the mean, where that is taken off, in fp32.
        """
        n, e = self.residual if elements is None else elements, self.run.element_bytes
        width = self.model.hidden if width is None else width
        numbers = 2 if self.model.norm == "layer" else 1
        kept = e * n + 4 * numbers * n / width
        return Operation(name, (Moved(2 * e * n),), (Moved(4 * e * n, 2),), (), Parameters(numbers * width), kept)

    def residual_add(self, name: str) -> Operation:
        """Bias, dropout and the residual: input and residual are read, the sum and the dropout's mask written.

        Without bias and dropout both take the sum's gradient as it is.
        """
        n, e, mask = self.residual, self.run.element_bytes, int(self.model.dropout)
        moved = Moved((3 * e + mask) * n)
        back = (moved, Moved(3 * e * n)) if self.model.dropout or self.model.biases else ()
        return Operation(name, (moved,), back, saved_bytes=mask * n)
