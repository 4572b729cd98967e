"""Where a node's times come from."""

from __future__ import annotations

import math

import pytest
import torch

from evenpipe.partition.counting import Effort, Work, count
from evenpipe.partition.profiling import Profiles, profile
from evenpipe.partition.timing import Measured, Roofline, RooflineError
from evenpipe.planner.descriptions import DescriptionError, device


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
