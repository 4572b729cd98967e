"""What evictions need of a link, estimated from Megatron's arguments before anything has been trained."""

from __future__ import annotations

from argparse import Namespace
from typing import Final, NamedTuple

import torch

from evenpipe.runtime.bandwidth import ModelShape, Recompute, forward_flops, required_gbps, transfer_bytes
from evenpipe.runtime.compute_speed import matrix_flops

__all__ = ["Need", "compute_flops", "recompute_scope", "transfer_need"]

_EQUATIONS: Final[dict[Recompute, str]] = {
    "none": "equation 4, attention scores saved",
    "selective": "equation 5, no attention scores saved",
    "full": "equation 6, layers recomputed",
}
# A device is as fast with more rows or columns; these are allocated at once.
_MOST_ROWS: Final = 4096
_MOST_COLUMNS: Final = 4096


class Need(NamedTuple):
    """GB/s (10^9 bytes/s) that hide a transfer behind one forward, and in words where the number comes from."""

    strict_gbps: float
    origin: str


def compute_flops(args: Namespace, device: torch.device) -> float:
    """Floating-point operations per second of `device` in a matrix product of the model's shape and type."""
    rows = args.seq_length // args.context_parallel_size * args.micro_batch_size
    columns = 4 * args.hidden_size // args.tensor_model_parallel_size
    return matrix_flops(device, args.params_dtype, min(rows, _MOST_ROWS), args.hidden_size, min(columns, _MOST_COLUMNS))


def transfer_need(args: Namespace, flops: float) -> Need:
    """What one transfer of a micro-batch's saved activations needs, if a forward runs at `flops` all the time.

    An upper bound for dense layers with an MLP of four times the hidden size: a real forward takes longer.
    """
    shape = ModelShape(args.num_layers, args.num_attention_heads, args.hidden_size, args.seq_length)
    p, t = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    # Context-parallel ranks share a micro-batch's sequence as they would share its samples.
    b = args.micro_batch_size / args.context_parallel_size
    scope, fp32 = recompute_scope(args), args.params_dtype == torch.float32
    nbytes = transfer_bytes(shape, p, t, b, scope, sequence_parallel=args.sequence_parallel) * (2 if fp32 else 1)
    strict = required_gbps(nbytes, forward_flops(shape, p, t, b) / flops * 1e3)
    sequence = f"{'with' if args.sequence_parallel else 'without'} sequence parallelism, " if t > 1 else ""
    return Need(
        strict,
        f"{nbytes / 2**20:,.1f} MiB a micro-batch ({_EQUATIONS[scope]}, {sequence}{'32' if fp32 else '16'} bit) within "
        f"a forward, if it ran at the {flops / 1e12:,.3g} TFLOP/s of a matrix product of this shape",
    )


def recompute_scope(args: Namespace) -> Recompute:
    """What Megatron's arguments have recomputed; fused attention saves as little as recomputed attention."""
    if args.recompute_granularity == "full":
        return "full"
    recomputed = args.recompute_granularity == "selective" and "core_attn" in (args.recompute_modules or ["core_attn"])
    backend = getattr(getattr(args, "attention_backend", None), "name", "auto")
    fused = args.transformer_impl == "transformer_engine" and backend in ("auto", "flash", "fused")
    return "selective" if recomputed or fused else "none"
