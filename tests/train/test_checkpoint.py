"""Checkpoints on disk: whenever a process dies while writing one, the one before or the new one is found."""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from evenpipe.train.checkpoint import Draft, check, find, refuse_misfit
from evenpipe.train.options import OptionsError, TrainOptions

OPTIONS = TrainOptions.of(iterations=100)


def save(directory: Path, iterations: int, contents: bytes = b"weights") -> None:
    draft = Draft(directory, iterations)
    draft.begin()
    draft.write("rank_00000.pt", lambda file: file.write(contents))
    draft.complete(OPTIONS)


def contents_of_latest(directory: Path) -> tuple[int, bytes]:
    checkpoint = find(directory)
    return checkpoint.iterations, (checkpoint.folder / "rank_00000.pt").read_bytes()


def in_a_process(act: Callable[[], None]) -> int:
    """The exit status of a fork that does it: 0 if it got to the end."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at(operation: int, act: Callable[[], None]) -> int:
    """As `in_a_process`, but killed before the file operation of that number."""

    def do() -> None:
        left = [operation]

        def count(event: str, arguments: object) -> None:
            if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        act()

    return in_a_process(do)


@pytest.mark.parametrize("iterations", [1, 2])
def test_killed_before_any_file_operation_the_old_or_the_new_checkpoint_is_the_latest(
    iterations: int, tmp_path: Path
) -> None:
    old, new = (1, b"old"), (iterations, b"new")
    seen, operation, status = [], 0, -signal.SIGKILL
    while status == -signal.SIGKILL:
        directory = tmp_path / str(operation)
        save(directory, *old)
        status = killed_at(operation, lambda directory=directory: save(directory, *new))
        seen.append(contents_of_latest(directory))
        Draft(directory, 4).begin()
        assert contents_of_latest(directory) == seen[-1]
        save(directory, 3)
        assert contents_of_latest(directory) == (3, b"weights")
        assert not [*directory.glob("*.partial"), *directory.glob("*.replaced")]
        operation += 1
    assert status == 0
    assert operation > 8
    assert set(seen) == {old, new}
    assert seen == sorted(seen, key=[old, new].index), "once the new one is the latest, it stays that"


def test_what_is_half_written_is_not_found_and_makes_way(tmp_path: Path) -> None:
    draft = Draft(tmp_path, 5)
    draft.begin()
    draft.write("rank_00000.pt", lambda file: file.write(b"half"))
    with pytest.raises(OptionsError, match="no checkpoint there"):
        find(tmp_path)
    save(tmp_path, 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000006", "latest"]


def test_a_discarded_draft_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    save(tmp_path, 5)
    draft = Draft(tmp_path, 6)
    draft.begin()
    draft.discard()
    assert contents_of_latest(tmp_path) == (5, b"weights")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000005", "latest"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    draft = Draft(tmp_path, 5)
    draft.begin()

    def act() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(OSError, match="File too large") as caught:
            draft.write("rank_00003.pt", lambda file: file.write(bytes(2000)))
        assert caught.value.filename == str(draft.partial / "rank_00003.pt")

    assert in_a_process(act) == 0


def test_a_folder_of_a_checkpoint_can_be_named_itself(tmp_path: Path) -> None:
    save(tmp_path, 5, b"five")
    save(tmp_path, 6, b"six")
    assert find(tmp_path).iterations == 6
    assert find(tmp_path / "iter_0000005").iterations == 5


@pytest.mark.parametrize(
    ("path", "contents", "said"),
    [
        ("iter_0000005/rank_00000.pt", b"weight", "the checkpoint is damaged (rank_00000.pt has another size)"),
        ("iter_0000005/checkpoint.json", b"{", "the checkpoint is damaged (Expecting"),
        ("iter_0000005/checkpoint.json", b"{}", "the checkpoint is damaged ('format')"),
        ("latest", b"iter_0000009", "the checkpoint is damaged ([Errno 2]"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(path: str, contents: bytes, said: str, tmp_path: Path) -> None:
    save(tmp_path, 5)
    (tmp_path / path).write_bytes(contents)
    with pytest.raises(OptionsError) as refusal:
        find(tmp_path)
    assert str(refusal.value).startswith(f"--load {tmp_path}/iter_000000")
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


MISFITS = [
    ({"stages": 2}, "--stages 2: {} was saved with --stages 4: use that, or another --load"),
    ({"precision": "bf16"}, "--precision bf16: {} was saved with --precision fp32: use that, or another --load"),
    (
        {"untie_embeddings": True},
        "--untie-embeddings: given, but {} was saved without it: leave it out, or another --load",
    ),
    ({"iterations": 5}, "--iterations 5: {} has 5 behind it: use more, or leave --load out"),
]


@pytest.mark.parametrize(("values", "line"), MISFITS)
def test_a_run_that_does_not_fit_is_refused_with_both_values(
    values: dict[str, object], line: str, tmp_path: Path
) -> None:
    save(tmp_path, 5)
    options = TrainOptions.of(**{"iterations": 100, "load": str(tmp_path), **values})
    with pytest.raises(OptionsError) as refusal:
        check(options)
    assert str(refusal.value) == line.format(tmp_path / "iter_0000005")


@pytest.mark.parametrize("values", [{"lr": 0.5}, {"schedule": "gpipe"}, {"engine": "megatron"}, {"dropout": 0.5}])
def test_what_changes_no_tensor_may_change(values: dict[str, object], tmp_path: Path) -> None:
    save(tmp_path, 5)
    refuse_misfit(TrainOptions.of(iterations=100, **values), find(tmp_path))


def test_an_engine_of_another_framework_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 5)
    with pytest.raises(OptionsError, match=r"--engine module: .*/iter_0000005 was saved with --engine evenpipe: use"):
        refuse_misfit(TrainOptions.of(iterations=100, engine="module"), find(tmp_path))


def test_a_checkpoint_of_before_there_were_frameworks_is_of_megatron(tmp_path: Path) -> None:
    save(tmp_path, 5)
    manifest = tmp_path / "iter_0000005" / "checkpoint.json"
    fields = json.loads(manifest.read_text())
    assert fields.pop("framework") == "megatron"
    manifest.write_text(json.dumps(fields))
    refuse_misfit(OPTIONS, find(tmp_path))


def test_a_folder_that_cannot_be_saved_to_is_told_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionsError, match=r"--save .*/file/folder: cannot be made \(Not a directory\): name another"):
        check(TrainOptions.of(save=str(tmp_path / "file" / "folder")))
