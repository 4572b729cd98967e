"""Variables that hurt are named with their reason and remedy; others are not."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from evenpipe.doctor.environment import environment
from evenpipe.doctor.finding import Finding, Verdict


def found(environ: Mapping[str, str], several_nodes: bool = False, tensor: int | None = None) -> dict[str, Finding]:
    """By variable, but for the allocator's, which always has something to say."""
    every = [each for each in environment(environ, several_nodes, tensor) if each.check == "environment"]
    return {each.said.partition("=")[0]: each for each in every}


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NCCL_P2P_DISABLE", "1"),
        ("NCCL_P2P_LEVEL", "LOC"),
        ("NCCL_SHM_DISABLE", "1"),
        ("NCCL_DEBUG", "TRACE"),
        ("CUDA_LAUNCH_BLOCKING", "1"),
        ("TORCH_NCCL_BLOCKING_WAIT", "true"),
        ("NCCL_BLOCKING_WAIT", "1"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        ("NCCL_ASYNC_ERROR_HANDLING", "0"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),
    ],
)
def test_what_hurts_is_a_problem_with_a_reason_a_source_and_a_remedy(variable: str, value: str) -> None:
    one = found({variable: value})[variable]
    assert one.verdict is Verdict.PROBLEM
    assert one.said.startswith(f"{variable}={value}: ")
    assert "documentation" in one.said or "guide" in one.said
    assert one.remedy


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NCCL_IB_DISABLE", "1"),
        ("NCCL_NET_GDR_LEVEL", "LOC"),
        ("NCCL_SOCKET_IFNAME", "=lo"),
        ("GLOO_SOCKET_IFNAME", "lo"),
    ],
)
def test_what_hurts_between_nodes_is_a_problem_on_several_only(variable: str, value: str) -> None:
    assert found({variable: value}, several_nodes=True)[variable].verdict is Verdict.PROBLEM
    assert found({variable: value})[variable].verdict is Verdict.NOTE


@pytest.mark.parametrize(
    ("variable", "value"),
    [("NCCL_P2P_DISABLE", "0"), ("NCCL_DEBUG", "WARN"), ("NCCL_SOCKET_IFNAME", "eth0"), ("CUDA_LAUNCH_BLOCKING", "0")],
)
def test_values_that_do_not_hurt_are_fine(variable: str, value: str) -> None:
    assert {one.verdict for one in found({variable: value}, several_nodes=True).values()} == {Verdict.FINE}


def test_one_queue_is_right_with_tensor_parallelism_and_wrong_without() -> None:
    name, one = "CUDA_DEVICE_MAX_CONNECTIONS", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert found(one, tensor=1)[name].verdict is Verdict.PROBLEM
    assert found(one)[name].verdict is Verdict.NOTE
    assert name not in found(one, tensor=8)
    assert name not in found({name: "8"}, tensor=8)  # Megatron refuses it
    assert found({name: "8"})[name].remedy == found({name: "2"}, tensor=1)[name].remedy == "set it to 32"
    assert name not in found({name: "32"})


@pytest.mark.parametrize(
    ("environ", "verdict"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, Verdict.FINE),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments"}, Verdict.NOTE),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, Verdict.NOTE),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, Verdict.NOTE),
        ({}, Verdict.NOTE),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "max_split_size_mb:9"},
            Verdict.PROBLEM,
        ),
    ],
)
def test_the_allocators_configuration(environ: Mapping[str, str], verdict: Verdict) -> None:
    every = [each.verdict for each in environment(environ, False) if each.check == "allocator"]
    assert every[0] is verdict
