"""The line that EvenPipe adds to Megatron's log."""

from evenpipe.megatron.script.log import kept_line, log_line
from evenpipe.runtime.figures import StageFigures


def test_a_line_has_all_stages_in_order_with_units():
    stages = (StageFigures(3, 3 << 20, 1 << 19, 0.26), StageFigures(2, 2 << 20, 0, 0.0))
    assert log_line(10, stages) == (
        " [evenpipe] iteration 10 | peak live: 3 2 | peak saved MiB: 3.0 2.0 | evicted MiB: 0.5 0.0 | "
        "transfers exposed ms: 0.3 0.0 |"
    )


def test_what_is_kept_is_named():
    names = {"MXFP8Tensor": 2, "Float8Tensor": 24}
    assert kept_line(1, names) == (
        " [evenpipe] stage 1 keeps what is saved in special tensors, and evicts the rest: Float8Tensor, MXFP8Tensor"
    )
