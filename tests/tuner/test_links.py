"""Every link's messages are timed where they arrive, whichever stage comes late, and the links are left clean."""

from pathlib import Path

from tests.reports import reports


def test_each_link_is_measured_on_its_own_and_left_clean(tmp_path: Path) -> None:
    script = Path(__file__).with_name("link_cases.py")
    stages = reports(script, tmp_path, 3, each="stage")
    assert [set(measured) for measured, _ in stages] == [
        {"backward 1"}, {"forward 0", "backward 2"}, {"forward 1"}
    ]  # fmt: skip
    measured = {link: by_burst for of_stage, _ in stages for link, by_burst in of_stage.items()}
    for link, (single, triple) in measured.items():
        assert len(single) == len(triple) == 2
        if link == "backward 1":
            # 40 ms for 4000 bytes at a time, 10 ms for 1000; others may keep this machine busy.
            assert max(single) > 30
            assert max(triple) > 7
            assert min(single) < 200
            assert min(triple) < 60
        else:
            assert 0 < min(single + triple) < 25
    for _, follows in stages:
        assert all(number == int(link.split()[1]) for link, number in follows.items())
