"""A layer that is cut in half is counted by both parts, under its one number."""

import pytest
from megatron.core.transformer.enums import LayerType

from evenpipe.megatron.half_layers import HalvedLayout


@pytest.mark.parametrize(
    ("layout", "halves", "layers"),
    [
        ("Ett|ttL", (), [[0, 1], [2, 3]]),
        ("Ett|ttL", (1,), [[0, 1], [1, 2, 3]]),
        ("Ettt|t|mL", (1, 2), [[0, 1, 2], [2, 3], [3]]),
        ("Et||t|L", (1, 3), [[0], [0], [1], [1]]),
    ],
)
def test_the_layers_of_each_stage(layout, halves, layers):
    stages = len(layers)
    found = HalvedLayout(layout, stages, halves)
    assert [found.get_layer_id_list(pp_rank=stage) for stage in range(stages)] == layers
    assert [stage for stage in range(stages) if found.ends_inside(None, stage)] == [half - 1 for half in halves]
    assert str(found) == layout
    assert sum(found.get_num_layers_to_build(LayerType.mtp, pp_rank=stage) for stage in range(stages)) == layout.count(
        "m"
    )
