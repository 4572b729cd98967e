"""A recipe's files are written together, whole, and over nothing that is there."""

from __future__ import annotations

import os
import sys

import pytest

from evenpipe.recipes import RecipeError
from evenpipe.recipes.files import write_files

FILES = {"train.sh": "#!/usr/bin/env bash\n", "README.md": "read\n"}


def test_the_folder_is_made_and_scripts_can_be_run(tmp_path):
    write_files(tmp_path / "a" / "b", FILES)
    assert {path.name: path.read_text() for path in (tmp_path / "a" / "b").iterdir()} == FILES
    assert os.access(tmp_path / "a" / "b" / "train.sh", os.X_OK)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"], "nothing is left beside it"


def test_what_is_there_is_written_over_only_by_force(tmp_path):
    (tmp_path / "README.md").write_text("mine\n")
    with pytest.raises(RecipeError, match=r"README\.md.*--force"):
        write_files(tmp_path, FILES)
    assert (tmp_path / "README.md").read_text() == "mine\n"
    assert not (tmp_path / "train.sh").exists()
    write_files(tmp_path, FILES, force=True)
    assert (tmp_path / "README.md").read_text() == "read\n"


def test_a_link_to_nowhere_is_there_too(tmp_path):
    (tmp_path / "train.sh").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RecipeError, match=r"train\.sh"):
        write_files(tmp_path, FILES)


@pytest.mark.parametrize("calls", range(6))
def test_a_write_that_is_killed_leaves_every_file_old_or_new(calls, tmp_path):
    """The process is ended, as a kill would, before its n-th call that changes the file system."""
    folder = tmp_path / "recipe"
    old = {name: f"old {name}\n" for name in FILES}
    write_files(folder, old)
    left = calls

    def counted(event: str, args: tuple[object, ...]) -> None:
        nonlocal left
        if event in ("os.rename", "os.mkdir", "os.chmod") or (event == "open" and args[1] == "w"):
            left -= 1
            if left < 0:
                os._exit(9)

    child = os.fork()
    if not child:
        sys.addaudithook(counted)
        try:
            write_files(folder, FILES, force=True)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    for name, text in FILES.items():
        assert (folder / name).read_text() in (old[name], text)
