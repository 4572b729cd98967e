"""Lines that EvenPipe adds to Megatron's log."""

from evenpipe.megatron.script.log import kept_line


def test_what_is_kept_is_named():
    names = {"MXFP8Tensor": 2, "Float8Tensor": 24}
    assert kept_line(1, names) == (
        " [evenpipe] stage 1 keeps what is saved in special tensors, and evicts the rest: Float8Tensor, MXFP8Tensor"
    )
