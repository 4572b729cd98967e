"""Operations of an iteration, as papers and as Megatron-LM's log count them: forward and backward, once each."""

from __future__ import annotations

from collections.abc import Iterator

from evenpipe.descriptions import Model
from evenpipe.planner.operations.operation import FusedAttention, Gemm
from evenpipe.planner.operations.parts import Blocks, parts_of
from evenpipe.planner.run import Attention, Run

__all__ = ["logged_flops", "model_flops"]

#: A backward has two matrix products where a forward has one, but one where weights are frozen.
_PASSES, _FROZEN = 3, 2


def model_flops(model: Model, run: Run) -> float:
    """Return the operations of all matrix products. Attention counts as if nothing were masked.

    For GPT this is 72 B s L h² (1 + s/6h + V/12Lh) (Korthikanti et al. 2022, Appendix A).
    """
    return sum(_counted(model, run, "unfused"))


def logged_flops(model: Model, run: Run) -> float:
    """Return the operations by which Megatron-LM logs TFLOP/s/GPU (``training.py``, ``num_floating_point_operations``).

    Half of attention is masked, also BERT's, whose head counts as a GPT's, and none by a window or chunks. Routers
    count nothing, nor do norms but those of low ranks and further tokens, which are below one in a thousand.
    """
    return sum(_counted(model.model_copy(update={"causal": True, "window": 0, "chunk": 0}), run, "flash", "router"))


def _counted(model: Model, run: Run, attention: Attention, left_out: str = "") -> Iterator[float]:
    """Yield the operations of each block of the model, on one GPU; ``left_out``: the name of what counts nothing."""
    alone = Run(global_batch=run.global_batch, precision=run.precision, attention=attention)
    blocks = Blocks(model, alone)
    for part in parts_of(model, alone):
        for block, count in part.items():
            for one in blocks.operations[block]:
                passes = _FROZEN if run.lora_rank and one.weight_gradient else _PASSES
                works = [work.flops for work in one.forward if isinstance(work, Gemm | FusedAttention)]
                yield passes * run.global_batch * count * sum(works) * (one.name != left_out)
