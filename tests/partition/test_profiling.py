"""A profile: its bytes against those that autograd saves when a small model really runs, and its times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenpipe.descriptions import DescriptionError, device
from evenpipe.partition.counting import Effort, Work, count
from evenpipe.partition.profiling import Profiles, between, profile
from evenpipe.partition.timing import Measured, Roofline, RooflineError

MODELS = ["bert-large", "gpt2-large", "t5-large", "amoebanet-d"]


def saved_bytes(model: nn.Module, inputs: Mapping[str, Any]) -> int:
    """Of storages that a forward saves, each once, parameters and buffers left out."""
    held = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage  # kept, so that no other takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**inputs)
    del loss
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "fp32") for name in MODELS),
        ("bert-large", "bf16"),
        *(pytest.param(name, "bf16", marks=pytest.mark.long) for name in MODELS[1:]),
    ],
)
def test_a_profile_has_the_bytes_that_a_real_run_saves(small, name, precision):
    example, graph = small(name, precision)

    counts = count(graph, "cpu")

    assert sum(it.nbytes for it in counts.storages if it.savers) == saved_bytes(example.model, example.inputs)


@pytest.mark.long  # of BERT the whole profile is compared, below
@pytest.mark.parametrize("name", ["gpt2-large", "t5-large", "amoebanet-d"])
def test_bytes_at_any_micro_batch_size_follow_from_two_sizes(small, name):
    two, three, five = (count(small(name, micro_batch_size=size)[1], "cuda") for size in (2, 3, 5))

    found = between(two, three, 5)

    assert found is not None
    assert found.storages == five.storages
    assert found.parameters == five.parameters
    assert [node.cut_bytes for node in found.nodes] == [node.cut_bytes for node in five.nodes]
    assert [node.work.forward.flops for node in found.nodes] == [node.work.forward.flops for node in five.nodes]


def test_adam_keeps_eight_bytes_of_a_parameter_and_a_master_copy_of_half_precision(small):
    full, half = (count(small("gpt2-large", precision)[1], "cpu").parameters for precision in ("fp32", "bf16"))

    trained = [(a, b) for a, b in zip(full, half, strict=True) if a.gradient_bytes]
    assert trained
    for a, b in trained:
        elements = a.nbytes // 4
        assert (a.gradient_bytes, a.optimizer_bytes) == (4 * elements, 8 * elements)
        assert (b.nbytes, b.gradient_bytes, b.optimizer_bytes) == (2 * elements, 2 * elements, 12 * elements)


def test_tied_embeddings_are_one_parameter_with_users_at_both_ends(small):
    _, graph = small("gpt2-large")

    tied = [it for it in count(graph, "cpu").parameters if it.users[-1] - it.users[0] > len(graph.nodes) // 2]

    assert [(it.nbytes, len(it.users)) for it in tied] == [(128 * 64 * 4, 2)]


def test_cuda_saves_a_mask_of_one_byte_where_a_cpu_saves_four(small):
    _, graph = small("bert-large")
    cpu, cuda = (sum(it.nbytes for it in count(graph, kind).storages if it.savers) for kind in ("cpu", "cuda"))

    dropped = [node for node in graph.nodes if str(node.target) == "aten.dropout.default"]
    assert dropped
    assert cpu - cuda == sum(3 * math.prod(graph.observed[node].values[0].shape) for node in dropped)


def test_a_node_takes_as_long_as_what_takes_longest():
    a100 = Roofline(device("a100-40gb"))
    computing, moving, launching = (
        Effort(flops=93_600_000_000_000),
        Effort(moved=1_244_000_000_000),
        Effort(kernels=250),
    )

    times = a100.times(None, [Work(computing, moving), Work(launching)], "fp32")

    assert times[0] == pytest.approx((1000, 1000))
    assert times[1] == pytest.approx((1.0, 0))


def test_an_unknown_device_and_a_precision_it_lacks_are_refused_in_one_line():
    with pytest.raises(DescriptionError, match="a100: unknown among devices"):
        device("a100")
    with pytest.raises(RooflineError, match="v100-16gb does not compute in bf16: it does in fp32, fp16"):
        Roofline(device("v100-16gb")).times(None, [], "bf16")


def test_this_cpu_is_measured_node_by_node(small):
    _, graph = small("gpt2-large")

    found = profile(graph, Measured(torch.device("cpu"), repetitions=2, warm_up=1), "gpt2-large")

    linears = [node for node, it in zip(found.nodes, graph.nodes, strict=True) if "addmm" in str(it.target)]
    assert linears
    assert all(node.forward_ms > 0 and node.backward_ms > 0 for node in linears)
    assert (found.origin.source, found.origin.device) == ("measured", "cpu")


def test_a_matrix_product_has_two_operations_an_element_and_twice_that_in_its_backward(small):
    _, graph = small("t5-large")
    works = {node: it.work for node, it in zip(graph.nodes, count(graph, "cuda").nodes, strict=True)}
    linear = next(node for node in graph.nodes if str(node.target) == "aten.linear.default")

    (weight,) = (source for source in linear.all_input_nodes if source.op == "get_attr")
    elements = graph.module.get_parameter(weight.target).numel()
    tokens = math.prod(graph.observed[linear].values[0].shape[:-1])
    assert works[linear].forward.flops == 2 * elements * tokens
    assert works[linear].backward.flops == 4 * elements * tokens


def test_profiles_of_any_size_are_those_that_a_trace_of_that_size_gives(small, tmp_path):
    roofline = Roofline(device("a100-40gb"))
    profiles = Profiles(lambda size: small("bert-large", micro_batch_size=size)[1], roofline, "bert-large")

    found = profiles.at(5)

    assert found == profile(small("bert-large", micro_batch_size=5)[1], roofline, "bert-large")
    found.write(tmp_path / "profile.json")
    assert found.read(tmp_path / "profile.json") == found
    assert found.origin.digest == profiles.at(1).origin.digest
