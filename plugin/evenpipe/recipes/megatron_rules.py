"""Whether a run starts: Megatron-LM's own checks of its arguments, and EvenPipe's of its layout."""

from __future__ import annotations

from evenpipe.planner.run import Run

__all__ = ["starts"]


def starts(run: Run) -> bool:
    """Return whether Megatron starts the run (`validate_args` and `TransformerConfig.__post_init__`, 0.16)."""
    return all(
        (
            run.stages > 1 or run.chunks == 1,
            run.tensor > 1 or not run.user_buffers,
            run.sharded_optimizer or (run.moment_bytes >= 4 and not run.overlap_parameters),
            run.overlap_gradients or not run.overlap_parameters,
            # An optimizer on the host has moments in fp32, and asks for the precision-aware one, which is sharded.
            not run.optimizer_offload or (bool(run.sharded_optimizer) and run.moment_bytes >= 4),
            # EvenPipe's schedules do not start the offloading anew after each batch.
            not run.offload_modules or (run.blocking != () and run.recompute != "full"),
            not {"expert_fc1", "moe_act"} & set(run.offload_modules) or "moe" not in run.again,
            run.context == 1 or run.attention == "flash",
            # In a V the last part has both the loss and what is predicted further ahead.
            "vee" not in run.spec.needed(run.chunks) or run.further_part in (None, run.stages * run.chunks - 1),
            run.expert == 1 or run.tensor == 1 or run.sequence_parallel,
            # Tokens can travel beside another micro-batch's compute.
            not run.overlap_experts
            or (run.expert > 1 and run.recompute != "full" and (run.stages == 1 or run.chunks > 1)),
            # Graphs of whole layers cannot have a part of them carried out again.
            not run.graphs or run.recompute != "full",
        )
    )
