"""This process' share of a real megatron-core GPT or BERT in training, and one iteration as Megatron-LM does it."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from megatron.core import parallel_state, pipeline_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from evenpipe.megatron.cpu_mode import without_transformer_engine
from evenpipe.megatron.vee import part_of
from evenpipe.runtime.precisions import PRECISIONS
from evenpipe.train import data
from evenpipe.train.engine import FailureContext
from evenpipe.train.options import TrainOptions
from evenpipe.train.rules import EXPERTS_OF_A_TOKEN

__all__ = [
    "Learner",
    "Replica",
    "Stepped",
    "Tensors",
    "forward_step",
    "initialise",
    "make_learner",
    "micro_batches",
    "train_step",
]

_VOCABULARY_MULTIPLE: Final = 128
_FINAL_LR_FRACTION: Final = 0.1
_LAYER: Final = re.compile(r"(?:decoder|encoder)\.layers\.(\d+)\.(.*)")
_EXPERT: Final = re.compile(r"(?<=\.local_experts\.)\d+")
_OUTPUT_PROJECTIONS: Final = ("linear_proj.weight", "linear_fc2.weight")


class Replica(NamedTuple):
    """The model chunks that this process trains, first chunk first, and the configuration that they share."""

    config: TransformerConfig
    chunks: list[DistributedDataParallel]


def build_replica(options: TrainOptions, vocabulary: int, device: torch.device) -> Replica:
    """Build, initialise and wrap this process' chunks. Needs Megatron's parallel state and random seeds.

    `vocabulary` counts the tokens that occur; like Megatron, it is padded to a multiple of 128 × tensor-parallel.
    Weights depend on the seed and their place in the whole model, not on how that is cut into stages and shards.
    """
    config = _config(options, device)
    multiple = _VOCABULARY_MULTIPLE * options.tensor_parallel
    padded = -(-vocabulary // multiple) * multiple
    modules, part = [], part_of(options.plan.places)
    for chunk in range(options.plan.chunks):
        with part(chunk):
            modules.append(_module(options, config, padded, chunk))
    for module in modules:
        initialise(module, config, options)
        module.to(device)
    if options.precision != "fp32":
        modules = [Float16Module(config, module) for module in modules]
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=options.overlap_grad_reduce,
        use_distributed_optimizer=options.distributed_optimizer,
        bucket_size=None,
    )
    chunks = [
        DistributedDataParallel(config=config, ddp_config=ddp, module=module, disable_bucketing=chunk > 0)
        for chunk, module in enumerate(modules)
    ]
    _synchronise_gradients(config, chunks, options)
    return Replica(config, chunks)


def _config(options: TrainOptions, device: torch.device) -> TransformerConfig:
    """Megatron's configuration, without the fused kernels that need Apex or Transformer Engine."""
    recompute: dict[str, Any] = {}
    if options.recompute == "selective":
        recompute = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    elif options.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    experts: dict[str, Any] = {}
    if options.experts:
        # Without a capacity no token is dropped, so experts get other numbers of them in every micro-batch.
        experts = {"num_moe_experts": options.experts, "moe_router_topk": EXPERTS_OF_A_TOKEN}
        experts |= {"moe_aux_loss_coeff": 0.01, "add_bias_linear": False}
        experts |= {"expert_model_parallel_size": options.expert_parallel}
    interleaved = options.plan.chunks > 1
    return TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=options.heads,
        hidden_dropout=options.dropout,
        attention_dropout=options.dropout,
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.stages,
        virtual_pipeline_model_parallel_size=options.plan.chunks if interleaved else None,
        pipeline_dtype=PRECISIONS[options.precision],
        params_dtype=PRECISIONS[options.precision],
        bf16=options.precision == "bf16",
        fp16=options.precision == "fp16",
        deallocate_pipeline_outputs=True,
        # Batched point-to-point calls are silently wrong on two interleaved stages; Megatron-LM refuses them there.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        use_cpu_initialization=True,
        deterministic_mode=device.type == "cuda",
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **recompute,
        # Megatron wants this one where lengths vary, experts or not.
        moe_token_dispatcher_type="alltoall",
        variable_seq_lengths=options.min_length > 0,
        **experts,
    )


def _module(options: TrainOptions, config: TransformerConfig, vocabulary: int, chunk: int) -> torch.nn.Module:
    stage = parallel_state.get_pipeline_model_parallel_rank()
    shared: dict[str, Any] = {
        "config": config,
        "vocab_size": vocabulary,
        "max_sequence_length": options.seq_length,
        "pre_process": stage == 0 and chunk == 0,
        "post_process": stage == options.stages - 1 and chunk == options.plan.chunks - 1,
        "parallel_output": True,
        "share_embeddings_and_output_weights": not options.untie_embeddings,
        "vp_stage": chunk if options.plan.chunks > 1 else None,
    }
    module: torch.nn.Module
    if options.model == "gpt":
        if options.experts:
            without_transformer_engine()
        layer = get_gpt_layer_local_spec(num_experts=options.experts or None)
        module = GPTModel(transformer_layer_spec=layer, **shared)
    else:
        module = BertModel(
            num_tokentypes=0, transformer_layer_spec=bert_layer_local_spec, add_binary_head=False, **shared
        )
    return module


def initialise(module: torch.nn.Module, config: TransformerConfig, options: TrainOptions) -> None:
    """Draw every matrix with Megatron's own distribution, from a generator of its own.

    Drawing the whole matrix and keeping this rank's shard makes the result independent of the partition; vectors
    (biases, norms) start as constants anyway.
    """
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2:
            continue
        digest = hashlib.sha256(f"{options.seed} {_place(module, name, options)}".encode()).digest()
        # The dimension along which Megatron cut the matrix into tensor-parallel shards; None: every rank has it whole.
        cut: int | None = vars(parameter)["partition_dim"] if vars(parameter).get("tensor_model_parallel") else None
        shape = [size * options.tensor_parallel if dim == cut else size for dim, size in enumerate(parameter.shape)]
        whole = torch.empty(shape)
        draw = config.output_layer_init_method if name.endswith(_OUTPUT_PROJECTIONS) else config.init_method
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int.from_bytes(digest[:6], "big"))
            draw(whole)
        if cut is not None:
            whole = whole.chunk(options.tensor_parallel, dim=cut)[parallel_state.get_tensor_model_parallel_rank()]
        with torch.no_grad():
            parameter.copy_(whole)


def _place(module: torch.nn.Module, name: str, options: TrainOptions) -> str:
    """The name of a parameter in the whole model: layers and experts by their global number, tied embeddings by one."""
    first = parallel_state.get_expert_model_parallel_rank() * (options.experts // options.expert_parallel)
    name = _EXPERT.sub(lambda local: str(first + int(local[0])), name)
    match = _LAYER.fullmatch(name)
    if match is not None:
        block = getattr(module, "decoder" if options.model == "gpt" else "encoder")
        return f"layer {block.layers[int(match[1])].layer_number} {match[2]}"
    if name == "output_layer.weight" and not options.untie_embeddings:
        return "embedding.word_embeddings.weight"
    return name


def _synchronise_gradients(
    config: TransformerConfig, chunks: list[DistributedDataParallel], options: TrainOptions
) -> None:
    """Set the configuration's gradient functions as Megatron-LM's `train` does."""
    config.finalize_model_grads_func = finalize_model_grads
    if options.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        grad_sync = [chunk.start_grad_sync for chunk in chunks]
        config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
        config.grad_sync_func = grad_sync if len(chunks) > 1 else grad_sync[0]


def make_optimizer(options: TrainOptions, replica: Replica) -> MegatronOptimizer:
    """Return the optimizer of this process' chunks; the loss is scaled as it wants it."""
    config = OptimizerConfig(
        optimizer=options.optimizer,
        lr=options.lr,
        min_lr=_final_lr(options),
        weight_decay=options.weight_decay,
        sgd_momentum=options.momentum,
        clip_grad=options.clip_grad,
        params_dtype=PRECISIONS[options.precision],
        bf16=options.precision == "bf16",
        fp16=options.precision == "fp16",
        initial_loss_scale=options.initial_loss_scale,
        # Every overflow halves the scale: a short run cannot afford to lose another step to the same one.
        hysteresis=1,
        use_distributed_optimizer=options.distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(config, replica.chunks)
    replica.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def make_scheduler(options: TrainOptions, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Sets learning rate and weight decay; one step of it before each of the optimizer's.

    In iteration i (from 1) of n the rate is lr · i / warmup up to the end of the warm-up; the cosine then falls to a
    tenth of lr at i = n. A loaded state brings the number of iterations only: the rest is as this run's options say.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=_final_lr(options),
        lr_warmup_steps=options.lr_warmup,
        lr_decay_steps=options.iterations,
        lr_decay_style="constant" if options.lr_decay == "none" else options.lr_decay,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def _final_lr(options: TrainOptions) -> float:
    return options.lr * _FINAL_LR_FRACTION


class Learner(NamedTuple):
    """This process' part of a model in training."""

    options: TrainOptions
    replica: Replica
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    corpus: data.Corpus
    device: torch.device


class Tensors(NamedTuple):
    """A `data.MicroBatch` on the device of the model."""

    tokens: torch.Tensor
    labels: torch.Tensor
    counted: torch.Tensor


class Stepped(NamedTuple):
    """The outcome of an iteration: on the last stage its micro-batches' losses, and what `optimizer.step` returned.

    `grad_norm` is None where the step was skipped, since gradients overflowed.
    """

    reduced: list[dict[str, torch.Tensor]]
    updated: bool
    grad_norm: float | None


def make_learner(options: TrainOptions, corpus: data.Corpus, device: torch.device) -> Learner:
    """Seed everything, build the model and its optimizer; needs Megatron's parallel state."""
    _seed(options.seed)
    replica = build_replica(options, corpus.vocabulary, device)
    optimizer = make_optimizer(options, replica)
    return Learner(options, replica, optimizer, make_scheduler(options, optimizer), corpus, device)


def micro_batches(learner: Learner, first_iteration: int) -> list[Iterator[Tensors]]:
    """For each model chunk, all micro-batches of the run from that iteration on, which goes on without end."""
    return [_stream(learner, first_iteration) for _ in learner.replica.chunks]


def train_step(learner: Learner, streams: list[Iterator[Tensors]], failure: FailureContext) -> Stepped:
    """One iteration on what `streams`, one for each model chunk, have next.

    Whatever `get_forward_backward_func` returns carries out the schedule.
    """
    options, chunks = learner.options, learner.replica.chunks
    learner.scheduler.step(1)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    learner.optimizer.zero_grad()
    reduced: list[dict[str, torch.Tensor]] = pipeline_parallel.get_forward_backward_func()(
        forward_step_func=partial(forward_step, options),
        data_iterator=streams if len(chunks) > 1 else streams[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=options.micro_batches,
        seq_length=options.seq_length,
        micro_batch_size=options.micro_batch_size,
        decoder_seq_length=options.seq_length,
        forward_only=False,
    )
    failure.enter("optimizer step")
    updated, grad_norm, _ = learner.optimizer.step()
    return Stepped(reduced, updated, grad_norm)


def _seed(seed: int) -> None:
    """As Megatron-LM: stages draw differently, data-parallel replicas alike, shards as their regions need."""
    own = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)
    model_parallel_cuda_manual_seed(own)


def _stream(learner: Learner, first_iteration: int) -> Iterator[Tensors]:
    replica = parallel_state.get_data_parallel_rank()
    for iteration in itertools.count(first_iteration):
        for batch in learner.corpus.micro_batches(iteration, replica):
            yield Tensors(*(torch.from_numpy(array).to(learner.device) for array in batch))


def forward_step(options: TrainOptions, iterator: Iterator[Tensors], model: torch.nn.Module) -> tuple[Any, Any]:
    """Megatron's forward step: the model's output for the next micro-batch, and how to make a loss of it."""
    batch = next(iterator)
    if options.model == "gpt":
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
        # Without a mask, Megatron's own attention makes the causal one, once for all micro-batches.
        output = model(batch.tokens, positions, None, labels=batch.labels)
    else:
        output = model(batch.tokens, torch.ones_like(batch.tokens), lm_labels=batch.labels)
    return output, partial(_loss, batch.counted)


def _loss(
    counted: torch.Tensor, output: torch.Tensor | tuple[torch.Tensor, Any]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """As Megatron-LM's `loss_func`: summed loss, number of tokens, and both for the log."""
    losses = output[0] if isinstance(output, tuple) else output
    loss = torch.sum(losses.float() * counted)
    tokens = counted.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}
