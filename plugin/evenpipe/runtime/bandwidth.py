"""The bandwidth that evicting and loading activations needs, compared with the links it has (BPipe, appendix B)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evenpipe.runtime.placement import Placement

__all__ = ["Links", "ModelShape", "Recompute", "bandwidth_warnings", "required_gbps", "transfer_bytes"]

Recompute = Literal["none", "selective", "full"]
"""What the backward recomputes: nothing, the attention of each layer, or each layer (Megatron's names)."""


@dataclass(frozen=True)
class ModelShape:
    """A Transformer in the symbols of Table 5: layers L, heads H, hidden size D (h in the equations), sequence l."""

    layers: int
    heads: int
    hidden: int
    sequence_length: int


@dataclass(frozen=True)
class Links:
    """Bandwidths of one direction in GB/s (10^9 bytes/s): between two GPUs of a node, and of a node's whole network."""

    intra_node_gbps: float
    inter_node_gbps: float


def transfer_bytes(shape: ModelShape, p: int, t: int, b: int, recompute: Recompute) -> float:
    """Bytes that one GPU saves for one micro-batch of size b, in 16-bit precision; one eviction moves all of them.

    p stages, t tensor-parallel. With L, H, h, l of ``shape``:
    none: Llbh/(pt) * (34 + 5Hl/h) (Eq. 4); selective: 34 Llbh/(pt) (Eq. 5); full: 2 Llbh/p (Eq. 6).

    Raises:
        ValueError: an unknown recompute scope.
    """
    llbh = shape.layers * shape.sequence_length * b * shape.hidden
    if recompute == "none":
        return llbh / (p * t) * (34 + 5 * shape.heads * shape.sequence_length / shape.hidden)
    if recompute == "selective":
        return 34 * llbh / (p * t)
    if recompute == "full":
        return 2 * llbh / p
    raise ValueError(f"recompute scope {recompute!r} is unknown: choose none, selective or full")


def required_gbps(
    shape: ModelShape, p: int, t: int, b: int, forward_ms: float, recompute: Recompute, *, relaxed: bool = False
) -> float:
    """GB/s (10^9 bytes/s) that one GPU needs so that transfers stay hidden behind compute.

    Strict: one transfer within one forward of f = ``forward_ms`` (Eq. 7-9: bytes / f). Relaxed: an eviction and a load
    within one backward and one forward, a backward taking 2f (Eq. 10-12: 2 bytes / 3f).

    Raises:
        ValueError: an unknown recompute scope, or a forward time that is not positive.
    """
    if forward_ms <= 0:
        raise ValueError(f"forward time is {forward_ms} ms: give the measured time of one micro-batch's forward")
    strict = transfer_bytes(shape, p, t, b, recompute) / (forward_ms / 1e3) / 1e9
    return strict * 2 / 3 if relaxed else strict


def bandwidth_warnings(
    placement: Placement, shape: ModelShape, b: int, forward_ms: float, recompute: Recompute, links: Links
) -> tuple[str, ...]:
    """What a user should know about the links that evictions use, one line each; empty when all is well.

    Pairs that cross nodes are always reported, with the node's bandwidth divided by the GPUs that share it set against
    the bandwidth needed; pairs within a node only when their link is too slow.

    Raises:
        ValueError: as :func:`required_gbps`.
    """
    strict = required_gbps(shape, placement.p, placement.t, b, forward_ms, recompute)
    pairs = placement.d * (placement.p // 2)
    crossing = placement.crossing_pairs()
    warnings = []
    if crossing:
        sharing = placement.t  # a node has at most one end of one cut pair
        share = links.inter_node_gbps / sharing
        stages = ", ".join(f"{s}-{a}" for s, a in sorted({(pair.evictor, pair.acceptor) for pair in crossing}))
        verdict = _verdict(share, strict)
        remedy = "" if share >= strict else f"; {_remedy(placement, recompute)}"
        warnings.append(
            f"{len(crossing)} of {pairs} evictor-acceptor pairs cross nodes (stages {stages}): "
            f"{links.inter_node_gbps:g} GB/s shared by {sharing} GPUs gives each {share:.2f} GB/s, {verdict}{remedy}"
        )
    if len(crossing) < pairs and links.intra_node_gbps < strict:
        warnings.append(
            f"evictor-acceptor pairs within a node have {links.intra_node_gbps:.2f} GB/s, "
            f"{_verdict(links.intra_node_gbps, strict)}; {_more_recompute(recompute)}"
        )
    return tuple(warnings)


def _verdict(gbps: float, strict: float) -> str:
    relaxed = strict * 2 / 3
    if gbps >= strict:
        return f"enough: hiding a transfer behind one forward needs {strict:.2f} GB/s"
    if gbps >= relaxed:
        return (
            f"below the {strict:.2f} GB/s that hide a transfer behind one forward, above the {relaxed:.2f} GB/s that "
            "hide two behind a backward and a forward: evictions are hidden, a part of each load is not"
        )
    return f"too slow: training waits for transfers, which need {relaxed:.2f} to {strict:.2f} GB/s"


def _remedy(placement: Placement, recompute: Recompute) -> str:
    if placement.gpus_per_node % 2:
        return _more_recompute(recompute)
    half = placement.gpus_per_node // 2
    stay = f"choose a tensor-parallel size that divides {half}, so that pairs stay on a node"
    return f"{stay}, or {_more_recompute(recompute)}"


def _more_recompute(recompute: Recompute) -> str:
    return "use a faster link" if recompute == "full" else "recompute more"
