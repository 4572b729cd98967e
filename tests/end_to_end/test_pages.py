"""Pages show stored results: every number in their parts is one that a script has printed."""

import json
import re
import shlex
import sys
import urllib.error
import urllib.request
from datetime import date, timedelta
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from jobs import JOBS  # noqa: E402
from pages import RESULTS, _pivot, pages, stored  # noqa: E402
from published.two_bw import QUALITY  # noqa: E402

FRONT = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
STORED = sorted(RESULTS.glob("*.json"))


def test_pages_are_what_templates_make_of_the_stored_results():
    made = pages(stored())
    assert set(FRONT) <= set(made)
    differing = [path.name for path, text in made.items() if path.read_text() != text]
    assert not differing, "make them again: python benchmarks/run_all.py --only"


def test_a_number_that_is_changed_is_noticed():
    found = stored()
    found["memory"]["results"][-1]["bpipe_peak_bytes"][0] += 2**30
    assert pages(found)[ROOT / "README.md"] != (ROOT / "README.md").read_text()


def test_a_pivot_has_every_row_of_its_table_once():
    rows = [["4", "a", "1"], ["", "b", "2"], ["8", "a", "3"], ["", "a", "4"]]
    table = {"title": None, "columns": ["p", "by", "ms"], "rows": rows}
    assert _pivot(table, ["p"], ["by"], "{ms} ms", "by {}").splitlines() == [
        "| p | by a | by b |",
        "| --- | --- | --- |",
        "| 4 | 1 ms | 2 ms |",
        "| 8 | 3 ms, 4 ms | – |",
    ]


def test_figures_that_pages_quote_of_2bw_s_paper_are_those_of_the_data(monkeypatch):
    for number, (name, passage) in enumerate(QUALITY.items()):
        other = tuple(f"{number}{at}.777" for at in range(len(passage.figures)))
        monkeypatch.setitem(QUALITY, name, passage._replace(figures=other))
    made = pages(stored())
    for name, passage in QUALITY.items():
        assert all(figure in made[ROOT / "docs" / "2bw.md"] for figure in passage.figures), name
    assert all(
        figure in made[ROOT / "README.md"] for name in ("perplexities", "fewer") for figure in QUALITY[name].figures
    )


def test_times_of_a_busy_machine_are_told_and_what_no_load_changes_is_not():
    found, page = stored(), ROOT / "docs" / "benchmarks.md"
    said = "**Timed on a busy machine**"
    for document in found.values():
        document["machine"] |= {"cpus": 2, "load_before": 2.0}
    assert said not in pages(found)[page]
    for name, times in (("figures_2bw", 0), ("overhead", 1), ("bubbles_in_a_script", 2)):
        found[name]["machine"]["load_before"] = 2.01
        assert pages(found)[page].count(said) == times


def test_a_result_of_a_tree_that_was_not_committed_is_told():
    found, page, said = stored(), ROOT / "docs" / "benchmarks.md", "**Not of a commit**: the tree was 1234567 with"
    for document in found.values():
        document["versions"]["evenpipe"] = "1234567"
    assert said not in pages(found)[page]
    found["memory"]["versions"]["evenpipe"] += "-dirty"
    made = pages(found)[page]
    assert made.count(said) == 1
    assert "nobody can check that tree out (memory)." in made


def test_results_are_those_of_the_jobs_that_make_them_again():
    assert {path.stem for path in STORED} == {job.name for job in JOBS if job.result}


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_result_says_by_what_when_on_what_and_with_which_versions(path):
    document = json.loads(path.read_text())
    assert document["format"] == "evenpipe.benchmark/1"
    assert date.fromisoformat(document["date"]) <= date.today() + timedelta(days=1)
    assert {"platform", "processor", "cpus", "load_before", "load_after"} <= set(document["machine"])
    assert {"python", "torch", "evenpipe", "megatron-core", "deepspeed"} <= set(document["versions"])
    (job,) = (job for job in JOBS if job.name == path.stem)
    words = shlex.split(document["command"])
    assert words[1] == f"benchmarks/{Path(job.command[0]).name}"
    assert words[2 : 1 + len(job.command)] == [*job.command[1:]]


def test_pictures_are_drawn_by_jobs():
    shown = {Path(target).name for path in FRONT for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", path.read_text())}
    assert shown
    assert shown <= {job.picture for job in JOBS}
    assert all((ROOT / "docs" / name).exists() for name in shown)


_OF_THE_ROOT = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = [ROOT / name for name in (*_OF_THE_ROOT, "patches/README.md", "recipes/README.md")]


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    shown = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in shown}


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in _anchors(target), link


_ADDRESS = re.compile(r"https?://[^\s)\]>\"'`<]+")
ADDRESSES = sorted(
    {
        found.rstrip(".,;:")
        for page in [*PAGES, ROOT / "AGENTS.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
        for found in _ADDRESS.findall(page.read_text())
    }
)


@pytest.mark.long
@pytest.mark.parametrize("address", ADDRESSES)
def test_an_external_link_leads_somewhere(address):
    """Skipped without a network; an answer that forbids programs (403, 429) is one."""
    asked = urllib.request.Request(address, headers={"User-Agent": "Mozilla/5.0 (link check)"})
    try:
        status = urllib.request.urlopen(asked, timeout=20).status
    except urllib.error.HTTPError as error:
        status = error.code
    except (urllib.error.URLError, TimeoutError) as error:
        pytest.skip(f"no network: {error}")
    assert status < 400 or status in (403, 405, 429)


def test_external_links_are_found():
    assert any(address.startswith("https://arxiv.org/abs/") for address in ADDRESSES)
