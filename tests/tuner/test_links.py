"""Every link's messages are timed where they arrive, whichever stage comes late, and the links are left clean.

With BPipe, evictions and loads cost in estimates what they take on the links of their pair.
"""

from pathlib import Path
from statistics import fmean

from tests.reports import reports


def test_each_link_is_measured_on_its_own_and_left_clean(tmp_path: Path) -> None:
    script = Path(__file__).with_name("link_cases.py")
    stages = reports(script, tmp_path, 3)
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


def test_a_slow_eviction_makes_estimates_longer_and_the_group_size_another_one(tmp_path: Path) -> None:
    script = Path(__file__).with_name("eviction_cases.py")
    stages = reports(script, tmp_path, 4)
    assert all(found == stages[0] for found in stages), "all ranks know the same"
    fast, slow = stages[0]
    taken_ms = {tuple(link): fmean(samples) for name, *link, samples in slow["message_ms"] if name == "k1b1"}
    assert {link for link in taken_ms if link[0] in ("evict", "load")} == {
        *(("evict", 0, 3), ("load", 3, 0)),
        *(("evict", 1, 2), ("load", 2, 1)),
    }
    # 60 MB at 0.001 GB/s, longer than a forward and a backward; others may keep this machine busy.
    assert 60_000 < taken_ms["evict", 0, 3] < 120_000
    assert taken_ms["load", 3, 0] < 10_000
    assert fast["current"] == [1, 1, 8]
    assert slow["estimates_ms"]["k1b1"] > 1.1 * fast["estimates_ms"]["k1b1"]
    assert slow["current"][0] > 1
