"""A run of `evenpipe train` as the planner's descriptions have it."""

from __future__ import annotations

from evenpipe.descriptions import Model, cluster, framework
from evenpipe.planner.estimate import Estimate, Estimator
from evenpipe.planner.run import Run
from evenpipe.train.options import TrainOptions

__all__ = ["estimate_of"]

_BYTES = {"gpt": 256, "bert": 384}  # of a text, and BERT's mask, padded to a multiple of 128


def estimate_of(options: TrainOptions) -> Estimate:
    """Of a GPT or BERT without dropout, whose masks are larger on CPU, and without experts, which get what they get."""
    model = Model(
        name=options.model,
        layers=options.layers,
        hidden=options.hidden,
        heads=options.heads,
        vocabulary=_BYTES[options.model],
        sequence=options.seq_length,
        dropout=False,
        causal=options.model == "gpt",
        tied=not options.untie_embeddings,
    )
    run = Run(
        global_batch=options.micro_batches * options.micro_batch_size * options.data_parallel,
        tensor=options.tensor_parallel,
        stages=options.stages,
        data=options.data_parallel,
        chunks=options.chunks,
        micro_batch=options.micro_batch_size,
        recompute=options.recompute,
        schedule=options.schedule,
        bpipe=options.bpipe,
        group_size=options.group_size,
        precision=options.precision,
        attention="unfused",
        fused_softmax=False,
        sequence_parallel=False,
        sharded_optimizer=options.distributed_optimizer,
        gradients_in_fp32=True,
    )
    return Estimator(model, cluster(f"1x{options.world_size}-a100-80gb"), framework("megatron"))(run)
