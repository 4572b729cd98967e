"""A GPT or BERT as its pipeline stages, all in this process: weights in, losses and gradients out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from evenpipe.megatron.cpu_mode import without_transformer_engine
from evenpipe.megatron.train_engine.learner import initialise
from evenpipe.runtime.precisions import PRECISIONS
from evenpipe.train.data import Corpus, MicroBatch
from evenpipe.train.options import TrainOptions

__all__ = ["Stage", "build_stages", "forward_backward"]


@dataclass(frozen=True)
class Stage:
    """A stage's module, and its parameters as the optimizer groups them: matrices decay, vectors and biases do not."""

    module: nn.Module
    decayed: list[nn.Parameter]
    plain: list[nn.Parameter]
    holds_copy: bool
    """Whether its output layer is the copy of the first stage's word embedding."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """In the order of the groups."""
        return [*self.decayed, *self.plain]

    def fill(self, weights: Sequence[Tensor]) -> None:
        """Write weights in place as an optimizer does, unseen by autograd's check: what is saved of them changes."""
        for parameter, weight in zip(self.parameters, weights, strict=True):
            parameter.data.copy_(weight)

    @property
    def embedding(self) -> nn.Parameter:
        """The matrix that the first and the last stage hold a copy of each, if the embeddings are tied."""
        weight: nn.Parameter = self.module.shared_embedding_or_output_weight()
        return weight


def build_stages(options: TrainOptions, corpus: Corpus) -> list[Stage]:
    """The stages of the whole model with its initial weights; needs Megatron's parallel state of one process."""
    whole = _config(options, options.layers)
    # Tensor-parallel ranks pad the vocabulary together; here they are one.
    unsplit = options.model_copy(update={"tensor_parallel": 1})
    stages = []
    for number in range(options.stages):
        module = _module(options, corpus.vocabulary, number)
        initialise(module, whole, unsplit)
        module.to(PRECISIONS[options.precision])
        named = list(module.named_parameters())
        vectors = [parameter for name, parameter in named if parameter.dim() == 1 or name.endswith(".bias")]
        matrices = [parameter for _, parameter in named if not any(parameter is vector for vector in vectors)]
        tied = not options.untie_embeddings
        stages.append(Stage(module, matrices, vectors, holds_copy=tied and number == options.stages - 1))
    return stages


def forward_backward(
    stages: Sequence[Stage],
    options: TrainOptions,
    batches: Iterable[MicroBatch],
    per_token: bool = False,
    before: Sequence[Sequence[Tensor]] | None = None,
    route: Callable[[int, bool], None] = lambda place, older: None,
) -> tuple[float, list[list[Tensor]], int]:
    """One batch of one replica: the mean of its micro-batches' losses, per stage the sums of gradients; its tokens.

    Gradients are in the order of `Stage.parameters`, summed in fp32 in the order of the micro-batches. They are of the
    losses' mean or, `per_token`, of the sum of all tokens' losses.

    before: of PACI, each stage's older weights, on which it forwards its first p − 1 − s micro-batches. `route` is told
    of each forward's stage, and whether it is on these.
    """
    sums = [[torch.zeros_like(parameter, dtype=torch.float32) for parameter in stage.parameters] for stage in stages]
    losses, tokens = [], 0
    for stage in stages:
        stage.module.set_is_first_microbatch()  # of nothing without FP8
    present = [[parameter.detach().clone() for parameter in stage.parameters] for stage in stages]
    for number, batch in enumerate(batches):
        for place, stage in enumerate(stages) if before is not None else ():
            older = number < len(stages) - 1 - place
            stage.fill((before if older else present)[place])
            route(place, older)
        loss, count = _one(stages, options, batch, per_token, None if before is None else present)
        losses.append(loss / count)
        tokens += count
        for stage, own in zip(stages, sums, strict=True):
            for parameter, total in zip(stage.parameters, own, strict=True):
                assert parameter.grad is not None
                total.add_(parameter.grad)
                parameter.grad = None
    return sum(losses) / len(losses), sums, tokens


def _one(
    stages: Sequence[Stage],
    options: TrainOptions,
    batch: MicroBatch,
    per_token: bool,
    backwarded_on: Sequence[Sequence[Tensor]] | None,
) -> tuple[float, int]:
    """Forward and backward of one micro-batch, stage by stage; the sum of its counted tokens' losses, and these."""
    tokens, labels, counted = map(torch.from_numpy, batch)
    received: list[Tensor] = []
    outputs: list[Tensor] = []
    for stage in stages:
        if outputs:
            received.append(outputs[-1].detach().clone().requires_grad_())
            stage.module.set_input_tensor(received[-1])
        outputs.append(_output(stage.module, options, tokens, labels))
    for stage, weights in zip(stages, backwarded_on or (), strict=False):
        stage.fill(weights)
    total = torch.sum(outputs.pop().float() * counted)
    count = counted.sum().to(torch.int)
    if per_token:
        total.backward()
    else:
        # The auxiliary loss is of a micro-batch, of which a batch takes the mean.
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1 / options.micro_batches))
        (total / count / options.micro_batches).backward()
    while outputs:
        outputs.pop().backward(received.pop().grad)
    return total.item(), int(count.item())


def _output(module: nn.Module, options: TrainOptions, tokens: Tensor, labels: Tensor) -> Tensor:
    """Hidden states; from the last stage the losses of all positions."""
    if options.model == "gpt":
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        output = module(tokens, positions, None, labels=labels)
    else:
        output = module(tokens, torch.ones_like(tokens), lm_labels=labels)
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first


def _config(options: TrainOptions, layers: int) -> TransformerConfig:
    """Of a pipeline of one stage that has `layers`; without fused kernels."""
    experts: dict[str, Any] = {}
    if options.experts:
        experts = {"num_moe_experts": options.experts, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01}
        experts |= {"moe_token_dispatcher_type": "alltoall", "add_bias_linear": False}
    return TransformerConfig(
        num_layers=layers,
        hidden_size=options.hidden,
        num_attention_heads=options.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=options.precision == "bf16",
        params_dtype=PRECISIONS[options.precision],
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **experts,
    )


def _module(options: TrainOptions, vocabulary: int, number: int) -> nn.Module:
    layers = options.layers // options.stages
    first, last = number == 0, number == options.stages - 1
    multiple = 128 * options.tensor_parallel
    shared: dict[str, Any] = {
        "config": _config(options, layers),
        "vocab_size": -(-vocabulary // multiple) * multiple,
        "max_sequence_length": options.seq_length,
        "pre_process": first,
        "post_process": last,
        "share_embeddings_and_output_weights": (first or last) and not options.untie_embeddings,
    }
    if options.model == "gpt":
        if options.experts:
            without_transformer_engine()
        layer = get_gpt_layer_local_spec(num_experts=options.experts or None)
        module: nn.Module = GPTModel(transformer_layer_spec=layer, **shared)
        block = module.decoder
    else:
        module = BertModel(
            num_tokentypes=0, transformer_layer_spec=bert_layer_local_spec, add_binary_head=False, **shared
        )
        block = module.encoder
    for layer in block.layers:
        layer.layer_number += number * layers
    return module
