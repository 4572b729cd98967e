"""One of four processes that train a tiny GPT under CPU mode, in one layout after another.

The last rank prints its losses as JSON: it is a last stage in every layout.
"""

import json
import zlib
from collections.abc import Iterator
from datetime import timedelta
from typing import NamedTuple

import torch

from evenpipe.megatron.cpu_mode import cpu_mode

VOCABULARY, SEQUENCE, MICRO_BATCH, MICRO_BATCHES, ITERATIONS = 64, 16, 2, 8, 2


class Layout(NamedTuple):
    """How four processes divide the model: the rest of them is data-parallel."""

    tensor: int
    stages: int
    chunks: int = 1
    distributed_optimizer: bool = False
    dtype: torch.dtype = torch.float32
    dropout: float = 0.0
    recompute: bool = False
    sequence_parallel: bool = False


LAYOUTS = {
    "PP4": Layout(1, 4),
    "TP2 PP2": Layout(2, 2),
    "TP2 PP2, sequence parallel": Layout(2, 2, sequence_parallel=True),
    "PP4 VPP2": Layout(1, 4, chunks=2),
    "DP2 PP2, distributed optimizer": Layout(1, 2, distributed_optimizer=True),
    "PP4 bf16": Layout(1, 4, dtype=torch.bfloat16),
    "TP2 PP2, dropout": Layout(2, 2, dropout=0.2),
    "TP2 PP2, dropout, recompute": Layout(2, 2, dropout=0.2, recompute=True),
}


def train(layout: Layout) -> list[float]:
    """Losses of the iterations on the last stage, averaged over the batch; empty elsewhere."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    interleaved = layout.chunks > 1
    bf16 = layout.dtype is torch.bfloat16
    virtual = layout.chunks if interleaved else None
    parallel_state.initialize_model_parallel(layout.tensor, layout.stages, virtual)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    config = TransformerConfig(
        num_layers=8,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.stages,
        virtual_pipeline_model_parallel_size=virtual,
        sequence_parallel=layout.sequence_parallel,
        pipeline_dtype=layout.dtype,
        params_dtype=layout.dtype,
        bf16=bf16,
        hidden_dropout=layout.dropout,
        attention_dropout=layout.dropout,
        recompute_granularity="full" if layout.recompute else None,
        recompute_method="uniform" if layout.recompute else None,
        recompute_num_layers=1 if layout.recompute else None,
        deallocate_pipeline_outputs=True,
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        gradient_accumulation_fusion=False,
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    models: list[torch.nn.Module] = []
    for chunk in range(layout.chunks):
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            VOCABULARY,
            SEQUENCE,
            pre_process=stage == chunk == 0,
            post_process=stage == layout.stages - 1 and chunk == layout.chunks - 1,
            share_embeddings_and_output_weights=True,
            vp_stage=chunk if interleaved else None,
        )
        initialise(model, layout.tensor, parallel_state.get_tensor_model_parallel_rank())
        model.cuda(torch.cuda.current_device())
        models.append(Float16Module(config, model) if bf16 else model)
    wrapping = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=layout.distributed_optimizer,
        overlap_param_gather=layout.distributed_optimizer,
    )
    chunks = [DistributedDataParallel(config, wrapping, model) for model in models]
    config.finalize_model_grads_func = finalize_model_grads
    if layout.distributed_optimizer:
        config.no_sync_func = chunks[0].no_sync
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            clip_grad=1.0,
            bf16=bf16,
            params_dtype=layout.dtype,
            log_num_zeros_in_grad=True,
            use_distributed_optimizer=layout.distributed_optimizer,
            overlap_param_gather=layout.distributed_optimizer,
        ),
        chunks,
    )
    replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()

    def micro_batches() -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        for index in range(MICRO_BATCHES):
            tokens = torch.randint(0, VOCABULARY, (MICRO_BATCH, SEQUENCE + 1), generator=generator)
            if index % replicas == replica:
                yield tokens

    positions = torch.arange(SEQUENCE).expand(MICRO_BATCH, -1).contiguous()
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]

    def forward_step(iterator, model):
        tokens = next(iterator).cuda()
        output = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())

        def loss_function(losses):
            loss = losses.float().mean()
            return loss, {"loss": loss.detach().clone()}

        return output, loss_function

    losses = []
    for _ in range(ITERATIONS):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        iterators = [micro_batches() for _ in chunks]
        reported = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if interleaved else iterators[0],
            model=chunks if interleaved else chunks[0],
            num_microbatches=MICRO_BATCHES // replicas,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
        )
        succeeded, _, _ = optimizer.step()
        assert succeeded
        if reported:
            loss = torch.stack([part["loss"] for part in reported]).mean()
            torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group())
            losses.append(loss.item() / replicas)
    parallel_state.destroy_model_parallel()
    return losses


def initialise(model: torch.nn.Module, shards: int, shard: int) -> None:
    """Draw every matrix from its place in the whole model, so that all layouts start from the same weights."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        place = name.replace("output_layer.", "embedding.word_embeddings.")
        if name.startswith("decoder.layers."):
            _, _, index, rest = name.split(".", 3)
            place = f"{model.decoder.layers[int(index)].layer_number} {rest}"
        dimension = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
        shape = list(parameter.shape)
        if dimension is not None:
            shape[dimension] *= shards
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(place.encode()))) * 0.1
        if dimension is not None:
            whole = whole.chunk(shards, dim=dimension)[shard]
        parameter.data.copy_(whole)


def main() -> None:
    from tests.gloo import share_device

    torch.set_num_threads(1)
    mode = cpu_mode()
    mode.apply()
    share_device()
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    losses = {name: train(layout) for name, layout in LAYOUTS.items()}
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        print(json.dumps(losses))
    torch.distributed.destroy_process_group()
    mode.revert()


if __name__ == "__main__":
    main()
