"""The side file is on disk as a whole before it has its name, and is used with its own weights only."""

import os

import pytest
import torch

from evenpipe.delayed import side_file
from evenpipe.report.files import move_durably

CPU = torch.device("cpu")


class Steps:
    """What is saved of 2BW, and given back."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self, places=None):
        if places is None:
            return self.state
        return {**self.state, "before": [self.state["before"][place] for place in places]}

    def load_state_dict(self, state):
        self.state = state


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No other rank lacks anything."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_it_goes_with_its_own_weights(tmp_path, dtype):
    weights = [torch.arange(6, dtype=dtype).view(2, 3).t(), torch.tensor(2.0, dtype=dtype)]
    path = tmp_path / "folder" / "side.pt"
    side_file.write(path, "of iteration 3", Steps({"before": [torch.ones(2)]}), weights)
    assert torch.load(path)["format"] == "evenpipe.delayed/1"
    steps = Steps()
    assert side_file.resume(steps, [tmp_path / "none.pt", path], weights, CPU)
    assert steps.state["before"][0].tolist() == [1, 1]
    weights[1] += 1
    assert not side_file.resume(steps, [path], weights, CPU)
    assert steps.state is None


def test_parts_that_other_replicas_write_make_a_whole(tmp_path):
    weights = [torch.full((2,), float(number)) for number in range(3)]
    dense = side_file.Part([tmp_path / "dense.pt"], [weights[0], weights[2]], [0, 2])
    experts = side_file.Part([tmp_path / "none.pt", tmp_path / "experts.pt"], [weights[1]], [1])
    state = {"before": [weight - 10 for weight in weights], "outcome": [True, 1.5, None], "unlearnt": []}
    for part in (dense, experts):
        side_file.write(part.paths[-1], "of iteration 3", Steps(state), part.newest, part.places)
    steps = Steps()
    assert side_file.resume_parts(steps, [dense, experts], CPU)
    assert [before[0].item() for before in steps.state.pop("before")] == [-10, -9, -8]
    assert steps.state == {"outcome": [True, 1.5, None], "unlearnt": []}
    weights[1] += 1
    assert not side_file.resume_parts(steps, [dense, experts], CPU)
    assert steps.state is None


def test_if_one_rank_has_none_nobody_has(tmp_path, monkeypatch):
    path = tmp_path / "side.pt"
    side_file.write(path, "of iteration 3", Steps({"before": None}), [])
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.add_(1))
    steps = Steps("as made")
    assert not side_file.resume(steps, [path], [], CPU)
    assert steps.state is None


def test_file_and_folder_are_synced_around_the_name(tmp_path, monkeypatch):
    done = []
    sync, replace = os.fsync, os.replace

    def fsync(descriptor):
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def named(path, to):
        done.append("named")
        replace(path, to)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", named)
    side_file.write(tmp_path / "side.pt", "of iteration 3", Steps({}), [])
    assert done == [".side.pt", "named", tmp_path.name]
    done.clear()
    move_durably(tmp_path / "side.pt", tmp_path / "inside" / "side.pt")
    assert done[0] == "named"
    assert sorted(done[1:]) == sorted(["inside", tmp_path.name])


def test_what_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(RuntimeError) as error:
        side_file.write(tmp_path / "folder" / "side.pt", "of iteration 3", Steps({}), [])
    assert str(error.value).startswith("the checkpoint of iteration 3 could not be saved: ")
    assert "\n" not in str(error.value)
