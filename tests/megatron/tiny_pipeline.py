"""This process' share of a tiny GPT, and a record of what a pipelining function does with it."""

from __future__ import annotations

import copy
import hashlib
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from delayed_layers import replace_linear_layers
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.timers import Timers
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model

from evenpipe.megatron.supported import installed_release

if TYPE_CHECKING:
    from schedule_function_cases import Call, Case

VOCABULARY, HIDDEN, LONGEST, MICRO_BATCH = 32, 16, 16, 2
_RELEASE = installed_release()
#: What every schedule times, and what it waits for its neighbours in.
TIMED = ("forward-backward", "forward-compute", "backward-compute")
WAITS = ("forward-recv", "forward-send", "backward-recv", "backward-send")
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # is looked up without Transformer Engine, too


class ShardedNorm(torch.nn.LayerNorm):
    """A layer norm on a part of the sequence, which Megatron's own needs Apex or Transformer Engine for."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


class PackedAttention(torch.nn.Module):
    """Causal within each sequence of a row, which Megatron's own needs Transformer Engine for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, *passed: Any, packed_seq_params: PackedSeqParams, **_: Any) -> torch.Tensor:
        """Of query, key and value, [tokens, heads, hidden size of a head]; the same."""
        within = [tensor.split(packed_seq_params.cu_seqlens_q.diff().tolist()) for tensor in passed[:3]]
        attend = torch.nn.functional.scaled_dot_product_attention
        found = [attend(*(one.transpose(0, 1) for one in each), is_causal=True) for each in zip(*within, strict=True)]
        return torch.cat([one.transpose(0, 1) for one in found])


class Pipeline:
    """The model chunks of a case; calls the function and tells what came back, in what order what was called."""

    def __init__(self, case: Case, ours: bool) -> None:
        self._case = case
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        torch.manual_seed(1234 + dist.get_rank() if case.layout.tensor > 1 else 1234 + self._stage)
        tensor_parallel.model_parallel_cuda_manual_seed(1234 + self._stage)
        self.config = self._config()
        modules = [self._module(chunk) for chunk in range(case.layout.chunks)]
        for module in modules if case.engine_layers else ():
            replace_linear_layers(module, delay=ours)
        self.chunks: list[torch.nn.Module] = [Float16Module(self.config, m) if self._half else m for m in modules]
        self.events: list[str] = []
        self._groups: Any = None
        if case.ddp is None:
            parameters = [parameter for chunk in self.chunks for parameter in chunk.parameters()]
            self._optimizer: Any = torch.optim.SGD(parameters, lr=0.1)
        else:
            self._synchronise({**case.ddp, "delay_wgrad_compute": case.engine_layers and ours})
            settings = {"optimizer": "adam", "lr": 0.01, **self._half, "params_dtype": self._dtype}
            self._optimizer = get_megatron_optimizer(OptimizerConfig(**settings, **case.optimizer), self.chunks)
            self.config.grad_scale_func = self._optimizer.scale_loss
        if case.loss_scale is not None:
            self.config.grad_scale_func = lambda loss: loss * case.loss_scale
        if case.timers:
            self.config.timers = Timers(log_level=2, log_option="minmax")
            for name in WAITS:
                self.config.timers(name, log_level=2)
        for index, chunk in enumerate(self.chunks):
            chunk.set_is_first_microbatch = partial(self.events.append, f"first of chunk {index}")
        # Before the first step there is nothing to gather: Megatron-LM's loop sets the function after it.
        self._param_sync, self.config.param_sync_func = self.config.param_sync_func, None

    @property
    def _dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self._case.precision, torch.float32)

    @property
    def _half(self) -> dict[str, bool]:
        return {} if self._case.precision == "fp32" else {self._case.precision: True}

    def _config(self) -> TransformerConfig:
        layout = self._case.layout
        settings = {
            "num_layers": layout.stages * layout.chunks,
            "hidden_size": HIDDEN,
            "num_attention_heads": 2,
            "tensor_model_parallel_size": layout.tensor,
            "pipeline_model_parallel_size": layout.stages,
            "virtual_pipeline_model_parallel_size": layout.chunks if layout.chunks > 1 else None,
            "pipeline_dtype": self._dtype,
            "params_dtype": self._dtype,
            **self._half,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.0,
            "deallocate_pipeline_outputs": True,
            "overlap_p2p_comm": layout.chunks > 1,
            "batch_p2p_comm": layout.chunks == 1,
            "gradient_accumulation_fusion": False,
        }
        return TransformerConfig(**{**settings, **self._case.config})

    def _module(self, chunk: int) -> GPTModel:
        layout = self._case.layout
        spec: Any = get_gpt_layer_local_spec(self.config.num_moe_experts)
        if self.config.sequence_parallel:
            spec = copy.deepcopy(spec)
            spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = ShardedNorm
            spec = TransformerBlockSubmodules([spec], ShardedNorm)
        if self._case.calls[0].packed:
            spec = copy.deepcopy(spec)
            spec.submodules.self_attention.submodules.core_attention = PackedAttention
        return GPTModel(
            self.config,
            spec,
            VOCABULARY,
            LONGEST,
            pre_process=self._stage == chunk == 0,
            post_process=self._stage == layout.stages - 1 and chunk == layout.chunks - 1,
            share_embeddings_and_output_weights=self._case.tied,
            vp_stage=chunk if layout.chunks > 1 else None,
        )

    def _synchronise(self, settings: Any) -> None:
        """Wrap the chunks and set the configuration's functions as Megatron-LM's training loop does, recorded."""
        wrapping = DistributedDataParallelConfig(**settings)
        self.chunks = [
            DistributedDataParallel(self.config, wrapping, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(self.chunks)
        ]
        self.config.finalize_model_grads_func = self._finalize
        functions = {
            "no_sync": [self._no_sync(index) for index in range(len(self.chunks))],
            "grad_sync": [self._told("grad_sync", i, c.start_grad_sync) for i, c in enumerate(self.chunks)],
            "param_sync": [self._told("param_sync", i, c.start_param_sync) for i, c in enumerate(self.chunks)],
        }
        for name in self._case.synchronise:
            chosen = functions[name] if len(self.chunks) > 1 else functions[name][0]
            setattr(self.config, f"{name}_func", chosen)

    def _no_sync(self, index: int) -> Callable[[], Any]:
        @contextmanager
        def no_sync() -> Iterator[None]:
            self.events.append(f"no_sync{index} enter")
            with self.chunks[index].no_sync():
                yield
            self.events.append(f"no_sync{index} exit")

        return no_sync

    def _told(self, name: str, index: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(parameters: Any) -> Any:
            count = len(list(parameters))
            self.events.append(f"{name}{index} of {count} parameters")
            return function()

        return called

    def _finalize(self, model: list[Any], num_tokens: Any = None, **arguments: Any) -> None:
        groups = arguments[_RELEASE.process_groups_argument]
        ranks = {name: _ranks(group) for name, group in sorted(vars(groups).items())}
        given = "given" if groups is self._groups else "global"
        forced = arguments.get("force_all_reduce")
        self.events.append(f"finalize {len(model)} {described(num_tokens)} {given} {ranks} {forced}")
        finalize_model_grads(model, num_tokens, **arguments)

    def call(self, function: Callable[..., Any], call: Call, index: int) -> dict[str, Any]:
        """One call: its result, what happened in it, gradients; then, unless it is an evaluation, a step."""
        self.events.clear()
        for chunk in self.chunks:
            if isinstance(chunk, DistributedDataParallel):
                chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        if index:
            self.config.param_sync_func = self._param_sync
        interleaved = len(self.chunks) > 1
        iterators = [self._data(call, index) for _ in self.chunks]
        arguments = {
            "forward_step_func": self._recomputing_step(call) if self._partial else partial(self._forward_step, call),
            "data_iterator": iterators if interleaved or call.iterator_as_list else iterators[0],
            "model": self.chunks if interleaved or call.model_as_list else self.chunks[0],
            "num_microbatches": call.micro_batches,
            "seq_length": call.sequence,
            "micro_batch_size": MICRO_BATCH,
            "forward_only": call.evaluate,
            **self._given(call),
            **call.arguments,
        }
        with torch.set_grad_enabled(not call.evaluate):
            losses = function(**arguments)
        result = {"losses": described(losses), "events": list(self.events)}
        if not call.evaluate:
            result["gradients"] = described([self._gradient(p) for c in self.chunks for p in c.parameters()])
            self._optimizer.step()
        return result

    @property
    def _partial(self) -> bool:
        return self.config.num_microbatches_with_partial_activation_checkpoints is not None

    def _given(self, call: Call) -> dict[str, Any]:
        """What a call is given besides: the global groups, in an object of its own."""
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        given: dict[str, Any] = {}
        if call.force_all_reduce and _RELEASE.takes_force_all_reduce:
            given["force_all_reduce"] = True
        if "communicator" in call.groups:
            given["p2p_communicator"] = P2PCommunicator(pp_group=pipeline, config=self.config)
        if "groups" in call.groups:
            self._groups = given[_RELEASE.process_groups_argument] = _process_groups()
            self._groups.tp = parallel_state.get_tensor_model_parallel_group()
            self._groups.pp = pipeline
            self._groups.cp = parallel_state.get_context_parallel_group()
            self._groups.embd = parallel_state.get_embedding_group(check_initialized=False)
            self._groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
            self._groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return given

    def _data(self, call: Call, index: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Per micro-batch, tokens (micro-batch size, or 1 if packed; sequence + 1) and which of the labels count."""
        generator = torch.Generator().manual_seed(100 * index + parallel_state.get_data_parallel_rank())
        for number in range(call.micro_batches):
            length = call.sequence - 2 * (number % 3) if call.ragged or call.packed else call.sequence
            rows = 1 if call.packed else MICRO_BATCH
            tokens = torch.randint(0, VOCABULARY, (rows, length + 1), generator=generator)
            yield tokens, torch.rand(rows, length, generator=generator) < 0.8

    def _recomputing_step(self, call: Call) -> Callable[..., Any]:
        """A forward step that is told whether to recompute all layers, and does so."""

        def step(iterator: Any, model: torch.nn.Module, checkpoint_activations_microbatch: bool) -> Any:
            self.events.append(f"recomputes {checkpoint_activations_microbatch}")
            self.config.recompute_granularity = "full" if checkpoint_activations_microbatch else None
            return self._forward_step(call, iterator, model)

        return step

    def _forward_step(self, call: Call, iterator: Any, model: torch.nn.Module) -> Any:
        chunk = next(index for index, mine in enumerate(self.chunks) if mine is model)
        layers = get_attr_wrapped_model(model, "decoder").layers
        number = layers[0].current_microbatch if layers else "?"
        self.events.append(f"F{chunk}.{number}")
        tokens, counted = next(iterator)
        positions = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1).contiguous()
        packed = {"packed_seq_params": _packed(positions.shape[1])} if call.packed else {}
        output = model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous(), **packed)
        if output.requires_grad:
            output.register_hook(lambda gradient: self.events.append(f"B{chunk}.{number}"))
        return output, _pair if call.loss == "pair" else partial(_triple, counted)

    @staticmethod
    def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
        return getattr(parameter, "main_grad", parameter.grad)

    def weights(self) -> Any:
        """Every parameter."""
        for chunk in self.chunks:
            if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        return described([parameter for chunk in self.chunks for parameter in chunk.parameters()])

    def timers(self) -> dict[str, dict[str, bool]]:
        """Whether the timers of what every schedule does and waits for are running, and ever were."""
        if self.config.timers is None:
            return {}
        timers = {name: self.config.timers(name) for name in (*TIMED, *WAITS)}
        return {name: {"running": timer._started, "used": timer.active_time() > 0} for name, timer in timers.items()}


def _packed(tokens: int) -> PackedSeqParams:
    """Two sequences in a row, of a third and of the rest."""
    ends = torch.tensor([0, tokens // 3, tokens], dtype=torch.int32)
    longest = tokens - tokens // 3
    return PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)


def _pair(output: torch.Tensor, non_loss_data: bool = False) -> Any:
    if non_loss_data:
        return {"output": output.clone()}
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach().clone(), "alias": loss.detach()}


def _triple(counted: torch.Tensor, output: torch.Tensor) -> Any:
    loss = (output.float() * counted).sum()
    tokens = counted.sum().to(torch.int)
    return loss, tokens, {"lm loss": (loss.detach().clone(), tokens.clone())}


def _process_groups() -> Any:
    module, name = _RELEASE.process_groups_class.split(":")
    return getattr(importlib.import_module(module), name)()


def _ranks(group: Any) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


def described(value: Any) -> Any:
    """`value` for JSON, with its structure; tensors by dtype, shape and a hash of their bytes."""
    if isinstance(value, torch.Tensor):
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()[:16]}"
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(described, value)]
    return repr(value)
