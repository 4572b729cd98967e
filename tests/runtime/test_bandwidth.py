"""Bandwidth that transfers need: the paper's numbers (appendix B) and the lines a user reads."""

import pytest

from evenpipe.runtime.bandwidth import Links, ModelShape, Recompute, bandwidth_warnings, required_gbps, transfer_bytes
from evenpipe.runtime.placement import place

GPT3_96B = ModelShape(layers=80, heads=104, hidden=9984, sequence_length=2048)
FORWARD_MS = 143.37
"""Table 3, GPT-3 96B with 4-way tensor and 8-way pipeline parallelism, micro-batch size 2."""
NVLINK_AND_800_GBIT = Links(intra_node_gbps=300, inter_node_gbps=100)


def test_bytes_of_the_papers_fastest_configuration() -> None:
    assert transfer_bytes(GPT3_96B, p=8, t=4, b=2, recompute="selective") / 1e9 == pytest.approx(3.48, abs=0.005)


@pytest.mark.parametrize(("recompute", "gbps"), [("selective", 24.25), ("none", 100.31)])
def test_bandwidth_of_the_papers_fastest_configuration(recompute: Recompute, gbps: float) -> None:
    assert required_gbps(GPT3_96B, 8, 4, 2, FORWARD_MS, recompute) == pytest.approx(gbps, abs=0.005)


@pytest.mark.parametrize(
    ("recompute", "strict", "relaxed"),
    [
        ("none", "Llbh / (p t f) * (34 + 5 H l / h)", "2 Llbh / (3 p t f) * (34 + 5 H l / h)"),
        ("selective", "34 Llbh / (p t f)", "68 / 3 Llbh / (p t f)"),
        ("full", "2 Llbh / (p f)", "4 / 3 Llbh / (p f)"),
    ],
)
def test_equations_7_to_12(recompute: Recompute, strict: str, relaxed: str) -> None:
    """L=10, H=4, h=1000, l=500, b=3 (so Llbh = 1.5e7 and 5Hl/h = 10), p=5, t=2, f=1 ms."""
    worked_out = {
        "Llbh / (p t f) * (34 + 5 H l / h)": 1.5e7 / 10 * 44 / 1e-3 / 1e9,
        "2 Llbh / (3 p t f) * (34 + 5 H l / h)": 1e6 * 44 / 1e-3 / 1e9,
        "34 Llbh / (p t f)": 34 * 1.5e6 / 1e-3 / 1e9,
        "68 / 3 Llbh / (p t f)": 34 * 1e6 / 1e-3 / 1e9,
        "2 Llbh / (p f)": 2 * 3e6 / 1e-3 / 1e9,
        "4 / 3 Llbh / (p f)": 4e6 / 1e-3 / 1e9,
    }
    shape = ModelShape(layers=10, heads=4, hidden=1000, sequence_length=500)
    assert required_gbps(shape, 5, 2, 3, 1.0, recompute) == pytest.approx(worked_out[strict])
    assert required_gbps(shape, 5, 2, 3, 1.0, recompute, relaxed=True) == pytest.approx(worked_out[relaxed])


def test_pairs_on_one_node_with_nvlink_need_no_warning() -> None:
    placement = place(8, 4, 1, 8)
    assert bandwidth_warnings(placement, GPT3_96B, 2, FORWARD_MS, "none", NVLINK_AND_800_GBIT) == ()


def test_a_slow_link_within_the_node_is_reported() -> None:
    placement = place(8, 4, 1, 8)
    assert bandwidth_warnings(placement, GPT3_96B, 2, FORWARD_MS, "none", Links(32, 100)) == (
        "evictor-acceptor pairs within a node have 32.00 GB/s, too slow: training waits for transfers, "
        "which need 66.87 to 100.31 GB/s; recompute more",
    )


@pytest.mark.parametrize(
    ("inter_node_gbps", "verdict"),
    [
        (100, "12.50 GB/s, enough: hiding a transfer behind one forward needs 12.12 GB/s"),
        (
            80,
            "10.00 GB/s, below the 12.12 GB/s that hide a transfer behind one forward, above the 8.08 GB/s that hide "
            "two behind a backward and a forward: evictions are hidden, a part of each load is not; "
            "choose a tensor-parallel size that divides 4, so that pairs stay on a node, or recompute more",
        ),
        (
            50,
            "6.25 GB/s, too slow: training waits for transfers, which need 8.08 to 12.12 GB/s; "
            "choose a tensor-parallel size that divides 4, so that pairs stay on a node, or recompute more",
        ),
    ],
)
def test_pairs_across_nodes_are_always_reported_with_an_eighth_of_the_nodes_link(
    inter_node_gbps: float, verdict: str
) -> None:
    """t = 8 on nodes of 8, half the bytes of t = 4 in the same forward time; as many GPUs share the node's network."""
    warnings = bandwidth_warnings(place(8, 8, 1, 8), GPT3_96B, 2, FORWARD_MS, "selective", Links(300, inter_node_gbps))
    assert warnings == (
        "4 of 4 evictor-acceptor pairs cross nodes (stages 0-7, 1-6, 2-5, 3-4): "
        f"{inter_node_gbps:g} GB/s shared by 8 GPUs gives each {verdict}",
    )


def test_a_single_cut_pair_has_the_network_to_itself() -> None:
    (warning,) = bandwidth_warnings(place(6, 2, 1, 6), GPT3_96B, 2, FORWARD_MS, "full", Links(300, 1))
    assert warning.startswith(
        "1 of 3 evictor-acceptor pairs cross nodes (stages 1-4): 1 GB/s shared by 2 GPUs gives each 0.50 GB/s, too slow"
    )
    assert warning.endswith(
        "choose a tensor-parallel size that divides 3, so that pairs stay on a node, or use a faster link"
    )


def test_a_pipeline_of_one_stage_has_no_pairs_to_warn_about() -> None:
    assert bandwidth_warnings(place(1, 8, 4, 8), GPT3_96B, 2, FORWARD_MS, "none", Links(1, 1)) == ()


def test_bad_input_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^forward time is 0 ms: give the measured time"):
        required_gbps(GPT3_96B, 8, 4, 2, 0, "none")
    with pytest.raises(ValueError, match=r"^recompute scope 'attention' is unknown: choose none, selective or full$"):
        transfer_bytes(GPT3_96B, 8, 4, 2, "attention")  # type: ignore[arg-type]
