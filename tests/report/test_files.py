"""A file is written as a whole or not at all."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from evenpipe.report.files import check_writable, write_atomically


@pytest.mark.parametrize(("content", "written"), [("h\u00e9", "h\u00e9".encode()), (b"\x00\xff", b"\x00\xff")])
def test_text_and_bytes(tmp_path: Path, content: str | bytes, written: bytes) -> None:
    write_atomically(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == written


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk in the middle of writing leaves the old content, and nothing beside it."""
    target = tmp_path / "file"
    target.write_text("old")

    def half(self: Path, data: bytes) -> int:
        with open(self, "wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(target, "new and longer")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_reader_of_the_old_file_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with open(tmp_path / "file") as reader:
        write_atomically(tmp_path / "file", "new")
        assert reader.read() == "old"
    assert (tmp_path / "file").read_text() == "new"


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        write_atomically(tmp_path / "missing" / "file", "x")


def test_what_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    assert check_writable(tmp_path / "file") is None
    assert check_writable(tmp_path) == "is a folder: name a file in it"
    missing = tmp_path / "missing"
    assert check_writable(missing / "file") == f"there is no folder {missing}: make it, or name another"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that nobody can write to")
def test_a_folder_that_takes_no_files() -> None:
    line = check_writable(Path("/proc/self/file"))
    assert line is not None
    assert line.startswith(f"nothing can be written to the folder /proc/{os.getpid()} (")


def test_a_mode_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    target.chmod(0o640)
    write_atomically(target, "new")
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert target.read_text() == "new"


def test_every_name_of_a_file_has_the_new_content(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("old and longer")
    os.link(tmp_path / "one", tmp_path / "other")
    write_atomically(tmp_path / "one", "new")
    assert (tmp_path / "other").read_text() == "new"
    assert (tmp_path / "one").stat().st_nlink == 2


def test_a_fifo_is_written_and_stays(tmp_path: Path) -> None:
    fifo, read = tmp_path / "fifo", list[str]()
    os.mkfifo(fifo)
    assert check_writable(fifo) is None
    reader = threading.Thread(target=lambda: read.append(fifo.read_text()), daemon=True)
    reader.start()
    write_atomically(fifo, "new")
    reader.join(10)
    assert read == ["new"]
    assert stat.S_ISFIFO(fifo.lstat().st_mode)
    assert os.listdir(tmp_path) == ["fifo"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_a_device_is_written_and_stays(tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("no devices can be made here")
    write_atomically(device, "new")
    assert stat.S_ISCHR(device.lstat().st_mode)
