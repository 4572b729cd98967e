"""Checkpoints on disk: whenever a process dies while writing one, the one before or the new one is found."""

import hashlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from evenpipe.train.checkpoint import Draft, FileEntry, Manifest, check, find, refuse_misfit
from evenpipe.train.options import OptionsError, TrainOptions
from evenpipe.train.ownership import Disturbed

OPTIONS = TrainOptions.of(iterations=100, stages=1)
RUN = "1" * 32


def drafted(directory: Path, iterations: int, contents: bytes) -> tuple[Draft, dict[str, FileEntry]]:
    directory.mkdir(exist_ok=True)
    draft = Draft(directory, iterations, RUN)
    draft.begin()
    draft.write("rank_00000.pt", lambda file: file.write(contents))
    return draft, {"rank_00000.pt": FileEntry(bytes=len(contents), sha256=hashlib.sha256(contents).hexdigest())}


def save(directory: Path, iterations: int, contents: bytes = b"weights", keep: int = 0) -> None:
    draft, files = drafted(directory, iterations, contents)
    draft.complete(OPTIONS.model_copy(update={"keep": keep}), files)


def contents_of_latest(directory: Path) -> tuple[int, bytes]:
    checkpoint = find(directory)
    with checkpoint.opened("rank_00000.pt") as file:
        return checkpoint.iterations, file.read()


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
        drafted(directory, 4, b"half")
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
    drafted(tmp_path, 5, b"half")
    with pytest.raises(OptionsError, match="no checkpoint there"):
        find(tmp_path)
    save(tmp_path, 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000006", "latest"]


def test_a_discarded_draft_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    save(tmp_path, 5)
    draft, _ = drafted(tmp_path, 6, b"half")
    draft.discard()
    assert contents_of_latest(tmp_path) == (5, b"weights")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000005", "latest"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    draft, _ = drafted(tmp_path, 5, b"")

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


def edited(**fields: object) -> Callable[[Path], None]:
    """Of a folder's manifest, change fields without sealing it anew."""

    def edit(folder: Path) -> None:
        path = folder / "iter_0000005" / "checkpoint.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def written(path: str, contents: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / path).write_bytes(contents)


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (written("iter_0000005/rank_00000.pt", b"weight"), "iter_0000005: * (rank_00000.pt has another size)"),
    (written("iter_0000005/rank_00000.pt", b"weighty"), "rank_00000.pt: * (its bytes are not those that were saved)"),
    (written("iter_0000005/checkpoint.json", b"{"), "iter_0000005: * (checkpoint.json: is no JSON"),
    (written("iter_0000005/checkpoint.json", b"\xff"), "iter_0000005: * (checkpoint.json: is no JSON"),
    (written("iter_0000005/checkpoint.json", b"[" * 100_000), "iter_0000005: * (checkpoint.json: is no JSON"),
    (written("iter_0000005/checkpoint.json", b"{}"), "iter_0000005: * (checkpoint.json.format: is missing)"),
    (edited(iteration=4), "iter_0000005: * (checkpoint.json: its digest is another)"),
    (edited(files={}), "iter_0000005: * (checkpoint.json: its digest is another)"),
    (written("latest", b"iter_0000009 " + b"0" * 64), "iter_0000009: * (checkpoint.json: No such file or directory)"),
    (written("latest", b"iter_0000005 " + b"0" * 64), "latest: * (iter_0000005 is not the checkpoint that it names)"),
    (written("latest", b"iter_0000005"), "latest: * (it names no checkpoint)"),
    (written("latest", b"../iter_0000005\n"), "latest: * (it names no checkpoint)"),
    (written("latest", b"\xff\xfe"), "latest: * (it names no checkpoint)"),
    (lambda folder: (folder / "iter_0000005/rank_00000.pt").unlink(), "iter_0000005: * (rank_00000.pt is not there)"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_a_damaged_checkpoint_is_refused_in_one_line(
    damage: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    save(tmp_path, 5)
    damage(tmp_path)
    with pytest.raises(OptionsError) as refusal:
        contents_of_latest(tmp_path)
    line = str(refusal.value)
    assert line.startswith(f"--load {tmp_path}/")
    assert "\n" not in line
    assert said.replace("*", "the checkpoint is damaged") in line


def test_a_checkpoint_of_another_run_of_the_same_size_is_not_mixed_in(tmp_path: Path) -> None:
    save(tmp_path / "a", 5, b"theirs!")
    save(tmp_path / "b", 5, b"weights")
    (tmp_path / "a/iter_0000005/checkpoint.json").replace(tmp_path / "b/iter_0000005/checkpoint.json")
    with pytest.raises(OptionsError, match="is not the checkpoint that it names"):
        find(tmp_path / "b")


def test_only_so_many_checkpoints_are_kept_the_newest_and_the_latest_always(tmp_path: Path) -> None:
    for iterations in (2, 9, 4):  # as after a return to an earlier one
        save(tmp_path, iterations)
    save(tmp_path, 5, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000004", "iter_0000005", "latest"]
    save(tmp_path, 6, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000006", "latest"]
    assert contents_of_latest(tmp_path) == (6, b"weights")


def test_a_draft_with_a_file_too_many_or_too_few_is_completed_by_nobody(tmp_path: Path) -> None:
    draft, files = drafted(tmp_path, 5, b"weights")
    draft.write("rank_00001.pt", lambda file: file.write(b"of another run"))
    with pytest.raises(Disturbed, match="other files than this run wrote"):
        draft.complete(OPTIONS, files)
    (draft.partial / "rank_00001.pt").unlink()
    (draft.partial / "rank_00000.pt").unlink()
    with pytest.raises(Disturbed, match="other files than this run wrote"):
        draft.complete(OPTIONS, files)


MISFITS = [
    ({"stages": 2}, "--stages 2: {} was saved with --stages 1: use that, or another --load"),
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
    options = TrainOptions.of(**{"iterations": 100, "stages": 1, "load": str(tmp_path), **values})
    with pytest.raises(OptionsError) as refusal:
        check(options)
    assert str(refusal.value) == line.format(tmp_path / "iter_0000005")


@pytest.mark.parametrize("values", [{"lr": 0.5}, {"clip_grad": 0.5}, {"engine": "megatron"}, {"dropout": 0.5}])
def test_what_changes_no_tensor_may_change(values: dict[str, object], tmp_path: Path) -> None:
    save(tmp_path, 5)
    refuse_misfit(TrainOptions.of(**{"iterations": 100, "stages": 1, **values}), find(tmp_path))


def test_an_engine_of_another_framework_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 5)
    with pytest.raises(OptionsError, match=r"--engine module: .*/iter_0000005 was saved with --engine evenpipe: use"):
        refuse_misfit(TrainOptions.of(iterations=100, stages=1, engine="module"), find(tmp_path))


@pytest.mark.parametrize(
    "kept", [("iteration", "options", "files"), ("iteration", "framework", "options", "run", "files")]
)
def test_a_checkpoint_of_another_format_is_refused_in_one_line(kept: tuple[str, ...], tmp_path: Path) -> None:
    save(tmp_path, 5)
    manifest = tmp_path / "iter_0000005" / "checkpoint.json"
    fields = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({name: fields[name] for name in kept} | {"format": "evenpipe.checkpoint/1"}))
    with pytest.raises(OptionsError) as refusal:
        find(tmp_path)
    assert str(refusal.value) == (
        f"--load {tmp_path / 'iter_0000005'}: it is of the format 'evenpipe.checkpoint/1', which this version of "
        "EvenPipe does not know: name another"
    )


def test_a_manifest_with_an_option_too_many_or_too_few_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 5)
    found = find(tmp_path).manifest
    fewer = {name: value for name, value in found.options.items() if name != "heads"}
    for options in (fewer, found.options | {"another": 1}):
        with pytest.raises(ValueError, match="options: they are those of another version of EvenPipe"):
            Manifest.of(run=RUN, iteration=5, framework="megatron", options=options, files=found.files)


def test_a_folder_that_cannot_be_saved_to_is_told_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionsError, match=r"--save .*/file/folder: cannot be made \(Not a directory\): name another"):
        check(TrainOptions.of(save=str(tmp_path / "file" / "folder")))
