"""`make docs` builds the pages as a site: every link leads somewhere, and every public name has its reference."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_release import ROOT, public

pytest.importorskip("mkdocs")
pytestmark = pytest.mark.gate


def build(out: Path, configuration: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", configuration, "-d", out]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(out)
    assert done.returncode == 0, done.stderr
    return out


def test_every_page_is_in_it_and_can_be_searched(site):
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"index", "changelog", "contributing", "catalogue"}
    assert pages <= {path.stem for path in site.glob("*.html")}
    assert (site / "search" / "search_index.json").stat().st_size > 100_000


def test_public_names_have_a_reference(site):
    found = set(re.findall(r'id="(evenpipe[\w.]+)"', (site / "api.html").read_text()))
    assert {f"{module}.{name}" for module, name in public() if not name.startswith("__")} <= found


def test_nothing_is_loaded_from_elsewhere(site):
    """A page is whole on a machine without a network."""
    for page in site.glob("*.html"):
        loaded = re.findall(r'<(?:script|img|link)[^>]*?(?:src|href)="?(https?://[^" >]+)', page.read_text())
        assert loaded == [], page.name


def test_a_flag_is_never_broken_at_its_hyphens(site):
    """On a narrow screen, in a line and in a table; one that is wider than the screen is."""
    page_of = pytest.importorskip("benchmarks.browser", reason="needs playwright")
    try:
        with page_of.chromium() as browser:
            page = browser.new_page(viewport={"width": 400, "height": 900})
            page.goto((site / "megatron.html").as_uri())
            words = page.evaluate(
                "[...document.querySelectorAll('article code .word')].map(one => [one.textContent, "
                "one.getBoundingClientRect().height / parseFloat(getComputedStyle(one).lineHeight)])"
            )
    except page_of.NoBrowser as error:
        pytest.skip(str(error))
    assert {"--evenpipe", "--evenpipe-schedule"} <= {word for word, _ in words}
    assert not [word for word, lines in words if lines > 1.5 and len(word) < 40]


def test_a_link_that_leads_nowhere_is_reported(tmp_path):
    """To a page, and to a place in one."""
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("# A\n\n[one](nowhere.md) [two](#nothing)\n")
    own = (ROOT / "mkdocs.yml").read_text()
    validation = re.search(r"^validation:\n(?: .*\n)+", own, re.M)[0]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: x\n{validation}")
    done = build(tmp_path / "out", tmp_path / "mkdocs.yml")
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr
    assert "#nothing" in done.stderr
