"""A tensor that a rank holds twice is written once by Megatron's own checkpoints, and loaded into both places."""

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from evenpipe.megatron.cpu_mode import cpu_mode
from evenpipe.megatron.vee import vee_patches

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU mode refuses machines with CUDA"),
]


@pytest.fixture
def alone(tmp_path):
    """A job of one process, under the patches of a V."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    with cpu_mode().in_force(), vee_patches().in_force():
        yield
    dist.destroy_process_group()


def sharded(key, number, replica=0):
    return ShardedTensor.from_rank_offsets(key, torch.full((2,), float(number)), replica_id=(replica, 0, 0))


def state(number):
    """A copy before its original in a list, and one that its dictionary has nothing beside; all of one `number`."""
    return {
        "model": {"word": sharded("word", number), "output": sharded("word", number, replica=1)},
        "optimizer": {
            "masters": [
                [sharded("master word", number, replica=1), sharded("other", 7), sharded("master word", number)]
            ],
            "state": {
                1: {"exp_avg": sharded("avg word", number)},
                0: {"exp_avg": sharded("avg word", number, replica=1)},
            },
        },
        "step": 3,
    }


def test_both_places_get_what_was_written_once(alone, tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    dist_checkpointing.save(state(5), str(folder))
    loaded = dist_checkpointing.load(state(0), str(folder))
    masters, average = loaded["optimizer"]["masters"][0], loaded["optimizer"]["state"]
    assert [tensor.tolist() for tensor in masters] == [[5, 5], [7, 7], [5, 5]]
    assert loaded["model"]["word"].tolist() == loaded["model"]["output"].tolist() == [5, 5]
    assert average[0]["exp_avg"].tolist() == average[1]["exp_avg"].tolist() == [5, 5]
    average[0]["exp_avg"].zero_()
    assert average[1]["exp_avg"].tolist() == [5, 5], "an optimizer steps each by itself"
