"""A traced graph: its loss, where it may be cut, what every stage computes for itself, and what cannot be traced."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn

from evenpipe.partition.trace import TraceError, tensors_of, trace


def test_the_graph_computes_the_models_own_loss(small):
    example, graph = small("t5-large")
    example.model.eval()
    try:
        graph = trace(example.model, example.inputs)
        own = tensors_of(example.model)
        held = {name: own[name] for name in tensors_of(graph.module) if name in own}
        loss = torch.func.functional_call(graph.module, held, kwargs=dict(example.inputs))
        assert torch.equal(loss, example.model(**example.inputs).loss)
    finally:
        example.model.train()


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.first(x)
        flat = scores.view(-1)
        scores += 1
        out: Tensor = self.second(scores).sum() + flat.mul(2).sum()
        return out


def test_no_cut_between_a_tensor_and_a_change_of_it_in_place():
    graph = trace(InPlace(), {"x": torch.ones(2, 8)})
    at = {str(node.target): number for number, node in enumerate(graph.nodes)}
    view, change = at["aten.view.default"], at["aten.add_.Tensor"]

    first = next(number for number, node in enumerate(graph.nodes) if str(node.target) == "aten.linear.default")
    assert not any(graph.cut_allowed[first:change])
    assert first < view < change


def test_no_cut_where_two_views_of_one_storage_would_be_sent():
    graph = trace(InPlace(), {"x": torch.zeros(2, 8)})

    for number, nodes in enumerate(graph.sent):
        storages = [graph.observed[node].values[0].storage for node in nodes]
        if len(set(storages)) < len(storages):
            assert not graph.cut_allowed[number]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum()


def test_a_batch_norm_keeps_its_counter():
    graph = trace(Normed(), {"x": torch.zeros(4, 8)})
    operations = [str(node.target) for node in graph.nodes]

    for number, operation in enumerate(operations):
        if operation == "aten.add_.Tensor":
            assert operations[number + 1] == "aten.batch_norm.default"
            assert not graph.cut_allowed[number]
    assert operations.count("aten.add_.Tensor") == 2


def test_results_of_one_operation_stay_together():
    class Chunked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            a, b, c = super().forward(x).exp().chunk(3, dim=-1)
            return (a * b).exp().sum() + c.sin().cos().sum()

    graph = trace(Chunked(6, 6), {"x": torch.zeros(2, 6)})
    operations = [str(node.target) for node in graph.nodes]
    chunk = operations.index("aten.chunk.default")

    assert operations[chunk + 1 : chunk + 4] == [operations[chunk + 1]] * 3
    assert not any(graph.cut_allowed[chunk : chunk + 3])


def test_masks_are_computed_by_every_stage_and_sent_by_none(small):
    _, graph = small("bert-large")

    assert any("arange" in node.name for node in graph.prefix)
    assert not set(graph.prefix) & {node for nodes in graph.sent for node in nodes}


class Alike(nn.Module):
    """Reads only the type or shape of its input after the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.layer(x)
        found = self.layer(scores).double().type_as(scores)
        found = found.flatten().view_as(scores).flatten().reshape_as(scores)
        out: Tensor = (self.layer(found) + found.sum().expand_as(scores)).sum()
        return out


def test_a_tensor_is_not_sent_for_its_type_or_shape():
    model, x = Alike(), torch.randn(2, 8)
    graph = trace(model, {"x": x})
    first, second, *_ = (n for n, node in enumerate(graph.nodes) if str(node.target) == "aten.linear.default")
    assert graph.nodes[first] in graph.sent[first]
    assert all(graph.nodes[first] not in sent for sent in graph.sent[second:])
    held = {name: one for name, one in tensors_of(model).items() if name in tensors_of(graph.module)}
    assert torch.equal(torch.func.functional_call(graph.module, held, kwargs={"x": x}), model(x))


def test_what_skips_stages_crosses_every_cut_between(small):
    _, graph = small("t5-large")
    sizes = {node: graph.observed[node].values[0].nbytes for node in graph.nodes if graph.observed[node].tensor}
    used = {
        node: max((graph.nodes.index(user) for user in node.users if user in graph.nodes), default=-1) for node in sizes
    }

    for number in range(0, len(graph.nodes) - 1, 7):
        crossing = [node for node in graph.nodes[: number + 1] if used.get(node, -1) > number]
        assert graph.cut_bytes(number) == sum(sizes[node] for node in crossing)


def test_layers_end_where_their_blocks_do(small):
    _, graph = small("bert-large")
    names = [graph.names[number] for number in graph.layer_ends]

    assert [name.rpartition(":")[0] for name in names[:3]] == [
        "bert.embeddings.dropout",
        "bert.encoder.layer.0.output.LayerNorm",
        "bert.encoder.layer.1.output.LayerNorm",
    ]
    assert graph.layer_ends[-1] == len(graph.nodes) - 1


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.sum() > 0:
            return y.mean()
        return y.sum()


class Counting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y[y > 0].sum()


class Reading(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.sum() * y.max().item()


class Lossless(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("model", "line"),
    [(Branching, "if y.sum() > 0"), (Counting, "y[y > 0]"), (Reading, "y.max().item()")],
)
def test_the_users_line_is_named_and_nothing_is_printed(model, line, capfd):
    with pytest.raises(TraceError) as caught:
        trace(model(8, 8), {"x": torch.zeros(2, 8)})

    source, start = inspect.getsourcelines(model)
    number = start + next(offset for offset, text in enumerate(source) if line in text)
    message = str(caught.value)
    assert line in message
    assert f"{__file__}:{number}" in message
    assert "\n" not in message
    assert capfd.readouterr().err == ""


def test_a_model_without_a_loss_is_told_what_to_return():
    with pytest.raises(TraceError, match="Lossless returns no loss"):
        trace(Lossless(8, 8), {"input": torch.zeros(2, 8)})


def test_an_argument_that_forward_lacks_is_named():
    with pytest.raises(TraceError, match="no argument 'y'"):
        trace(Branching(8, 8), {"y": torch.zeros(2, 8)})
