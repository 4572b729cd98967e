"""The MLP of a layer, or its experts."""

from __future__ import annotations

from evenpipe.planner.operations.operation import Collective, Gemm, Moved, Operation, Parameters
from evenpipe.planner.operations.shard import Shard

__all__ = ["experts", "mlp"]


def mlp(shard: Shard) -> list[Operation]:
    """The MLP block of a layer, from its norm to its residual."""
    return [
        shard.norm("norm of MLP"),
        *_two_layers(shard, shard.model.ffn / shard.run.tensor),
        shard.residual_add("residual of MLP"),
    ]


def _two_layers(shard: Shard, inner: float) -> list[Operation]:
    ways = 2 if shard.model.gated else 1
    return [
        shard.linear("up", ways * inner, shard.model.hidden, "column", kept=shard.residual),
        _activation(shard, shard.tokens * inner, ways),
        shard.linear("down", shard.model.hidden, inner, "row"),
    ]


def _activation(shard: Shard, elements: float, ways: int) -> Operation:
    """GELU with its bias, or of a gated MLP the product with the gate: the input is kept."""
    e = shard.run.element_bytes
    return Operation(
        "activation",
        (Moved((ways + 1) * e * elements),),
        (Moved((2 * ways + 2) * e * elements, 2),),
        saved_bytes=ways * e * elements,
    )


def experts(shard: Shard) -> list[Operation]:
    """The experts of a layer, their router, and the ways to them and back; tokens are taken to be spread evenly.

    Each rank has count / ep experts, whose matrices are divided among `expert_ways` ranks. Every token goes to
    ``chosen`` of them by an all-to-all over the expert-parallel ranks.
    """
    model, run, e = shard.model, shard.run, shard.run.element_bytes
    chosen = model.experts
    assert chosen is not None
    own = chosen.count / run.expert
    routed = shard.tokens * chosen.chosen * run.expert_ways / run.tensor
    inner, ways = chosen.ffn / run.expert_ways, 2 if model.gated else 1
    part = shard.residual / model.hidden * chosen.chosen * model.hidden  # of tokens that this rank gives away
    sent = Collective(e * part * (run.expert - 1) / run.expert, "expert")
    exchanged = (sent,) if run.expert > 1 else ()
    moved = Moved(3 * e * part, 2)
    gates = shard.residual / model.hidden * chosen.count
    shared = _two_layers(shard, chosen.shared_ffn / run.tensor) if chosen.shared_ffn else []
    return [
        shard.norm("norm of experts"),
        Operation(
            "router",
            (Gemm(shard.residual / model.hidden, chosen.count, model.hidden), Moved(16 * gates, 6)),
            (Gemm(shard.residual / model.hidden, model.hidden, chosen.count), Moved(16 * gates, 6)),
            (Gemm(model.hidden, chosen.count, shard.residual / model.hidden),),
            Parameters(chosen.count * model.hidden),
            saved_bytes=e * shard.residual + 8 * gates,
        ),
        Operation("dispatch", (moved, *exchanged), (moved, *exchanged), saved_bytes=8 * routed / run.expert_ways),
        _grouped(shard, "experts up", own, routed, ways * inner, model.hidden),
        _activation(shard, routed * inner, ways),
        _grouped(shard, "experts down", own, routed, model.hidden, inner),
        # The weighted sum needs what each expert gave.
        Operation("combine", (*exchanged, moved), (*exchanged, moved), saved_bytes=e * part),
        *shared,
        shard.residual_add("residual of experts"),
    ]


def _grouped(shard: Shard, name: str, own: float, routed: float, outputs: float, inputs: float) -> Operation:
    """One matrix product an expert, of its part of the ``routed`` tokens."""
    m = routed / own
    t = shard.run.expert_ways
    half = Collective((t - 1) / t * shard.run.element_bytes * routed * shard.model.hidden, "tensor")
    collected = (half,) if t > 1 else ()
    return Operation(
        name,
        (Gemm(m, outputs, inputs, own), *collected),
        (Gemm(m, inputs, outputs, own), *collected),
        (Gemm(inputs, outputs, m, own),),
        Parameters(0, own * outputs * inputs),
        saved_bytes=shard.run.element_bytes * routed * inputs,
    )
