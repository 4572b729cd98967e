"""With BPipe, evictions and loads cost in estimates what they take on the links of their pair."""

from pathlib import Path
from statistics import fmean

from tests.reports import reports


def test_a_slow_eviction_makes_estimates_longer_and_the_group_size_another_one(tmp_path: Path) -> None:
    script = Path(__file__).with_name("eviction_cases.py")
    stages = reports(script, tmp_path, 4, each="stage")
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
