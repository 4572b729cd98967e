"""A megatron-core training script of your own, with BPipe: the block between the lines is all that EvenPipe needs.

On a laptop:  torchrun --nproc-per-node 4 examples/megatron_core.py
"""

import os
import sys

import torch
import torch.distributed as dist

# --- EvenPipe ---------------------------------------------------------------------------------------------------------
from evenpipe.megatron.cpu_mode import cpu_mode
from evenpipe.megatron.schedule import PipelineSchedule, in_place_of_megatron

if not torch.cuda.is_available():
    cpu_mode().apply()
schedule = PipelineSchedule("1f1b", bpipe=True, measure=True)
in_place_of_megatron(schedule).apply()  # get_forward_backward_func() returns it from here on
# ----------------------------------------------------------------------------------------------------------------------

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

SEQUENCE, MICRO_BATCH, VOCABULARY, STAGES = 32, 2, 128, 4


def forward_step(batches, model):
    tokens = next(batches)
    positions = torch.arange(SEQUENCE, device=tokens.device).expand(MICRO_BATCH, -1)
    output = model(tokens, positions, None, labels=tokens.roll(-1, 1))
    return output, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})


def main():
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=STAGES)
    tensor_parallel.model_parallel_cuda_manual_seed(1)

    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        pipeline_model_parallel_size=STAGES,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        SEQUENCE,
        pre_process=stage == 0,
        post_process=stage == STAGES - 1,
        share_embeddings_and_output_weights=False,
    ).to("cuda" if on_gpu else "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(VOCABULARY, (MICRO_BATCH, SEQUENCE), generator=generator) for _ in range(8)]

    for iteration in range(5):
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batch.to(next(model.parameters()).device) for batch in batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
        )
        optimizer.step()
        if losses:
            mean = sum(float(loss["loss"]) for loss in losses) / len(losses)
            sys.stdout.write(f"iteration {iteration}: loss {mean:.4f}\n")
    peak = schedule.executor.counter.peak_units
    sys.stdout.write(f"stage {stage}: at most {peak} micro-batches live at once\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
