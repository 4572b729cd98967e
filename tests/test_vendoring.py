"""The patches for vendored copies of Megatron-LM: one for each supported release, without a line of it."""

from pathlib import Path

from evenpipe.megatron.supported import RELEASES

PATCHES = Path(__file__).resolve().parent.parent / "patches"


def test_each_supported_release_has_one_and_none_holds_a_line_of_megatron() -> None:
    assert {path.name for path in PATCHES.glob("*.patch")} == {f"megatron-lm-{series}.patch" for series in RELEASES}
    for path in PATCHES.glob("*.patch"):
        header, old, new, hunk, *lines = [text for text in path.read_text().splitlines() if text]
        assert path.name in header
        assert (old, new) == ("--- a/megatron/training/__init__.py", "+++ b/megatron/training/__init__.py")
        assert hunk.endswith(",2 @@")
        assert lines == ["+import evenpipe.megatron", "+evenpipe.megatron.install()"]
