"""A graph cut in two by hand, as two stages would run it: what is sent arrives as copies, and so does its gradient."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from evenpipe.partition.trace import Graph


def run(graph: Graph, model: nn.Module, inputs: Mapping[str, Tensor], cut: int | None) -> dict[str, Tensor]:
    """The loss and the gradients of the model's parameters, with a cut after node `cut`, or with none."""
    held: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    model.zero_grad()
    stages = [graph.nodes] if cut is None else [graph.nodes[: cut + 1], graph.nodes[cut + 1 :]]
    received: dict[fx.Node, Tensor] = {}
    ends: list[tuple[Tensor, Tensor]] = []
    for number, nodes in enumerate(stages):
        env: dict[fx.Node, Any] = dict(received)
        for node in graph.module.graph.nodes:
            if node.op == "placeholder":
                env[node] = inputs[node.target]
            elif node.op == "get_attr":
                env[node] = held[node.target] if node.target in held else operator.attrgetter(node.target)(graph.module)
        for node in (*graph.prefix, *nodes):
            env[node] = node.target(*fx.map_arg(node.args, env.__getitem__), **fx.map_arg(node.kwargs, env.__getitem__))
        if number < len(stages) - 1:
            for node in graph.sent[cut]:
                copy = env[node].detach().clone(memory_format=torch.contiguous_format)
                received[node] = copy.requires_grad_(env[node].requires_grad)
                ends.append((env[node], received[node]))
    loss = env[next(node for node in graph.module.graph.nodes if node.op == "output").args[0]]
    loss.backward()
    pairs = [(sent, got.grad) for sent, got in ends if sent.requires_grad]
    if pairs:
        torch.autograd.backward([sent for sent, _ in pairs], [gradient for _, gradient in pairs])
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}
