"""The side file is on disk as a whole before it has its name, and is used as it was written, with its own weights."""

import functools
import os
import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from evenpipe.report.files import move_durably
from evenpipe.runtime.weight_versions import WeightVersions
from evenpipe.schedule import find
from evenpipe.two_bw import side_file
from evenpipe.two_bw.stream import TwoBW

pytestmark = pytest.mark.usefixtures("alone")
resume = functools.partial(side_file.resume, accepts_one_version=False, setting="--one")


class Steps:
    """What is saved of 2BW, and given back."""

    correction = None
    versions = SimpleNamespace(in_place=False)

    def __init__(self, state=None):
        self.state = state

    def state_dict(self, places=None):
        if places is None:
            return self.state
        return {**self.state, "before": [self.state["before"][place] for place in places]}

    def load_state_dict(self, state):
        self.state = state


def write(part, state=None, iteration=3):
    side_file.write(part.paths[-1], iteration, f"of iteration {iteration}", Steps(state or {"before": None}), part)


def refused(parts, saved_with_2bw=True):
    """What is said; nothing was used."""
    steps = Steps("as made")
    with pytest.raises(side_file.SideFileError) as error:
        resume(steps, parts, 3, saved_with_2bw)
    assert steps.state == "as made"
    said = str(error.value)
    assert said.startswith("2bw: the checkpoint of iteration 3 was saved with 2bw, but ")
    assert said.endswith("or add --one, with which both weight versions are the loaded one")
    return said


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_it_goes_with_its_own_weights(tmp_path, dtype):
    weights = [torch.arange(6, dtype=dtype).view(2, 3).t(), torch.tensor(2.0, dtype=dtype)]
    part = side_file.Part([tmp_path / "none.pt", tmp_path / "folder" / "side.pt"], weights)
    write(part, {"before": [torch.ones(2)]})
    assert torch.load(part.paths[1])["format"] == "evenpipe.delayed/2"
    steps = Steps()
    assert resume(steps, [part], 3, None) == (True, "both weight versions are as they were saved")
    assert steps.state["before"][0].tolist() == [1, 1]
    weights[1] += 1
    assert f"{part.paths[1]} goes with other weights" in refused([part], saved_with_2bw=None)


def test_parts_that_other_replicas_write_make_a_whole(tmp_path):
    weights = [torch.full((2,), float(number)) for number in range(3)]
    dense = side_file.Part([tmp_path / "dense.pt"], [weights[0], weights[2]], [0, 2])
    experts = side_file.Part([tmp_path / "none.pt", tmp_path / "experts.pt"], [weights[1]], [1])
    state = {"before": [weight - 10 for weight in weights], "outcome": [True, 1.5, None], "unlearnt": []}
    for part in (dense, experts):
        write(part, state)
    steps = Steps()
    assert resume(steps, [dense, experts], 3, True)[0]
    assert [before[0].item() for before in steps.state.pop("before")] == [-10, -9, -8]
    assert steps.state == {"outcome": [True, 1.5, None], "unlearnt": []}
    weights[1] += 1
    assert f"{tmp_path / 'experts.pt'} goes with other weights" in refused([dense, experts])


def test_four_flipped_bytes_anywhere_are_found(tmp_path):
    """Before anything is used: in the weights, in what describes them, in the digest itself."""
    weights = [torch.arange(40.0)]
    part = side_file.Part([tmp_path / "side.pt"], weights)
    write(part, {"before": [torch.arange(40.0) - 1], "outcome": [True, 1.5, None], "unlearnt": []})
    path = part.paths[0]
    whole = path.read_bytes()
    draw = random.Random(1)
    for place in [*range(len(whole) - 100, len(whole) - 3, 4), *draw.sample(range(len(whole) - 4), 200)]:
        flipped = bytes(byte ^ draw.randrange(1, 256) for byte in whole[place : place + 4])
        path.write_bytes(whole[:place] + flipped + whole[place + 4 :])
        assert f"{path} is damaged" in refused([part]), place
    for length in (0, 40, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert f"{path} is damaged" in refused([part]), length


def test_a_file_that_is_missing_or_of_another_iteration_or_format_is_an_error_unless_it_is_accepted(
    tmp_path, monkeypatch
):
    part = side_file.Part([tmp_path / "side.pt"], [torch.ones(2)])
    assert f"there is no file {part.paths[0]}" in refused([part])
    write(part, iteration=2)
    assert f"{part.paths[0]} is of iteration 2" in refused([part])
    with monkeypatch.context() as patch:
        patch.setattr(side_file, "_FORMAT", "evenpipe.delayed/9")
        write(part)
    assert "is of the format evenpipe.delayed/9, which this version" in refused([part])
    steps = Steps()
    resumed, line = resume(steps, [part], 3, True, accepts_one_version=True)
    assert not resumed
    assert line.startswith(f"both weight versions are the loaded one, as {part.paths[0]} is of the format")
    assert steps.state is None


def test_a_checkpoint_that_was_saved_without_2bw_needs_none(tmp_path):
    part = side_file.Part([tmp_path / "side.pt"], [torch.ones(2)])
    line = "it was saved without 2bw: both weight versions are the loaded one"
    for says in (False, None):
        assert resume(Steps(), [part], 3, says) == (False, line)
    write(part, iteration=2)  # left by another run
    assert resume(Steps(), [part], 3, False) == (False, line)


class InPlace(Steps):
    """Of paci."""

    versions = SimpleNamespace(in_place=True)


def test_with_one_version_a_missing_file_or_other_parallel_sizes_are_no_error(tmp_path):
    """No setting would accept it: the one for 2bw is refused under paci."""
    weights = [torch.ones(2)]
    part = side_file.Part([tmp_path / "side.pt"], weights)
    steps = InPlace("as made")
    assert not resume(steps, [part], 3, True)[0]
    assert steps.state is None
    write(part, {"before": None, "outcome": [True, 1.5, None], "unlearnt": []})
    assert resume(steps, [part], 3, False)[0]
    assert steps.state["outcome"] == [True, 1.5, None]
    weights[0] = weights[0] + 1
    resumed, line = resume(steps, [part], 3, True)
    assert not resumed
    assert steps.state is None
    assert "both" not in line


def test_a_file_without_a_digest_is_never_used(tmp_path):
    part = side_file.Part([tmp_path / "side.pt"], [torch.ones(2)])
    write(part)
    content = torch.load(part.paths[0])
    for form in ("evenpipe.delayed/1", "evenpipe.delayed/2"):
        torch.save({**content, "format": form}, part.paths[0])
        assert f"{part.paths[0]} is damaged, or of another format: it does not end in its digest" in refused([part])


def test_if_one_rank_has_none_nobody_goes_on(tmp_path, monkeypatch):
    part = side_file.Part([tmp_path / "side.pt"], [])
    write(part)

    def gather(rows, mine):
        rows[:] = [mine, ("there is no file elsewhere.pt", False)]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    assert "but there is no file elsewhere.pt: " in refused([part])


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
    write(side_file.Part([tmp_path / "side.pt"], []))
    assert done == [".side.pt", "named", tmp_path.name]
    done.clear()
    move_durably(tmp_path / "side.pt", tmp_path / "inside" / "side.pt")
    assert done[0] == "named"
    assert sorted(done[1:]) == sorted(["inside", tmp_path.name])


def test_what_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(RuntimeError) as error:
        write(side_file.Part([tmp_path / "folder" / "side.pt"], []))
    assert str(error.value).startswith("the checkpoint of iteration 3 could not be saved: ")
    assert str(error.value).endswith("File exists: go on from the one before, which is whole")
    assert "\n" not in str(error.value)


class Corrected(Steps):
    """With a delay correction whose state is a process' own; `name` is the one that was saved."""

    correction = "error-feedback"

    def own_state(self):
        return {"corrected": [torch.full((3,), 7.0)]}

    def corrected_alike(self, state):
        return state["correction"] == self.correction


@pytest.mark.parametrize("saved", ["error-feedback", "weight-prediction"])
def test_a_correction_of_the_process_own_optimizer_has_a_file_of_its_own(tmp_path, saved):
    weights = [torch.ones(2)]
    part = side_file.Part([tmp_path / "stage.pt"], weights)
    own = side_file.Part([tmp_path / "rank.pt"], weights, own=True)
    steps = Corrected({"before": [torch.zeros(2)], "correction": saved})
    for one in (part, own):
        side_file.write(one.paths[0], 3, "of iteration 3", steps, one)
    fresh = Corrected()
    _, line = resume(fresh, [part, own], 3, True)
    if saved != fresh.correction:
        assert line.endswith("as they were saved; the delay correction begins anew")
        assert "corrected" not in fresh.state
        return
    assert line.endswith("as they were saved")
    assert fresh.state["corrected"][0].tolist() == [7, 7, 7]
    own.paths[0].unlink()
    with pytest.raises(side_file.SideFileError, match=r"but there is no file .*rank\.pt"):
        resume(Corrected(), [part, own], 3, True)


def test_buffers_of_a_weight_version_have_no_delay_correction(tmp_path):
    def two_bw(value):
        versions = WeightVersions([torch.full((2,), value)], buffers=[torch.full((3,), 10 * value)])
        gradients = SimpleNamespace(versions=versions, loss_scale=None, param_groups=[], optimizers=[])
        return TwoBW(gradients, find("2bw"), bpipe=False, correction="weight-prediction")

    part = side_file.Part([tmp_path / "side.pt"], [torch.ones(2)], places=[0, 1])
    saved, fresh = two_bw(1.0), two_bw(2.0)
    saved.batch = 1
    side_file.write(part.paths[0], 3, "of iteration 3", saved, part)
    assert resume(fresh, [part], 3, True)[0]
    assert [one.tolist() for one in fresh.versions.tensors(0)] == [[1, 1], [10, 10, 10]]
    assert [one.tolist() for one in fresh.correction.state()] == [[1, 1]]
