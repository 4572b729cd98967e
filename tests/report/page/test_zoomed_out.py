"""The page of a large plan: what is too narrow to be drawn one by one is drawn as shares, in the actions' colours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from evenpipe.cli.main import main
from evenpipe.schedule import KINDS

#: Of the timeline: which drawing is shown, the pixels of a typical action, and what its edges are drawn in.
_DRAWN = """() => {
  const view = [...Bokeh.index.roots].find((one) => one.model.name === "micro-batches in time");
  const of = (name) => view.model.renderers.find((one) => one.name === name);
  const { data } = of("boxes").data_source, { start, end } = view.model.x_range;
  const across = view.frame.bbox.width / (end - start);
  return {
    boxes: of("boxes").visible, shares: of("shares").visible,
    white: data.start.filter((_, i) => data.took[i] * across < 3 && data.edge[i] !== data.colour[i]).length,
    narrowest: Math.min(...data.took) * across,
    columns: [...of("shares").data_source.data.start].map((from, i) => {
      const { end, top, bottom, colour } = of("shares").data_source.data;
      return [from, end[i], top[i], bottom[i], colour[i]];
    }),
  };
}"""
#: Of what is on the canvas: the share of pixels that have each colour, to within a few steps of 255.
_PAINTED = """(colours) => {
  const view = [...Bokeh.index.roots].find((one) => one.model.name === "micro-batches in time");
  const { canvas } = view.canvas_view.primary, { data } =
    canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return colours.map(([r, g, b]) => {
    let like = 0;
    for (let i = 0; i < data.length; i += 4)
      like += Math.max(Math.abs(data[i] - r), Math.abs(data[i + 1] - g), Math.abs(data[i + 2] - b)) < 12;
    return like / (data.length / 4);
  });
}"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a plan of 64 micro-batches in ten chunks on eight stages: 10,240 actions."""
    folder = tmp_path_factory.mktemp("plan")
    asked = ("--model", "gpt3-96b", "--cluster", "4x8-a100-80gb", "--global-batch-size", "64")
    assert main(["plan", *asked, "--stages", "8", "--schedule", "1f1b", "--out", str(folder / "plan.json")]) == 0
    document = json.loads((folder / "plan.json").read_text())
    best = document["plans"][0]
    best |= {"schedule": "interleaved", "bpipe": False, "chunks": 10, "micro_batches": 64}
    (folder / "plan.json").write_text(json.dumps(document))
    assert main(["report", str(folder / "plan.json"), "--html", str(folder / "plan.html")]) == 0
    return folder / "plan.html"


@pytest.fixture(scope="module", params=[400, 1280])
def page(request: pytest.FixtureRequest, browser: Browser, plan: Path) -> Iterator[Page]:
    """The page in a width, which the last test changes."""
    found = browser.new_page(viewport={"width": request.param, "height": 900}, color_scheme="light")
    found.goto(plan.as_uri())
    found.wait_for_selector("html[data-ready=yes]", timeout=60_000)
    found.locator("#timeline-0").scroll_into_view_if_needed()
    found.wait_for_function("document.querySelector('.shown').textContent !== ''")
    yield found
    found.close()


def test_a_column_has_the_shares_of_its_time(page: Page) -> None:
    """All columns together have as much of each colour as all actions take."""
    row = 0.97 * 0.88 * 0.62
    areas = dict.fromkeys((KINDS[kind].colour for kind in "FB"), 0.0)
    for start, end, top, bottom, colour in page.evaluate(_DRAWN)["columns"]:
        areas[colour] += (end - start) * (bottom - top) / row
    took = page.evaluate("""() => {
      const view = [...Bokeh.index.roots].find((one) => one.model.name === "micro-batches in time");
      const { data } = view.model.document.get_model_by_name("actions"), sums = {};
      data.took.forEach((ms, i) => { sums[data.colour[i]] = (sums[data.colour[i]] ?? 0) + ms; });
      return sums;
    }""")
    assert areas == pytest.approx(took, rel=1e-6)


def test_boxes_come_back_where_there_is_room_and_narrow_ones_have_no_white_edge(page: Page) -> None:
    states = [page.evaluate(_DRAWN)]
    while not states[-1]["boxes"]:
        page.locator("[data-chart=timeline] button", has_text="Zoom in").click()
        page.wait_for_timeout(100)
        states.append(page.evaluate(_DRAWN))
    assert len(states) > 2
    assert not states[-1]["shares"]
    assert all(state["white"] == 0 or not state["boxes"] for state in states)
    page.locator("[data-chart=timeline] button", has_text="All").click()
    page.wait_for_timeout(100)
    assert page.evaluate(_DRAWN)["shares"]


def test_a_command_is_copied(page: Page) -> None:
    page.locator(".copy").first.click()
    assert page.locator(".copy").first.inner_text() in ("Copied", "Selected: copy it with Ctrl+C")
    assert page.evaluate("getSelection().toString()").startswith("evenpipe estimate --model gpt3-96b")


def test_it_is_not_drawn_white_in_any_width(page: Page) -> None:
    drawn = page.evaluate(_DRAWN)
    assert (drawn["boxes"], drawn["shares"]) == (False, True)
    colours = [[int(KINDS[kind].colour[at : at + 2], 16) for at in (1, 3, 5)] for kind in "FB"]
    page.wait_for_timeout(300)
    assert min(page.evaluate(_PAINTED, colours)) > 0.04, "forwards and backwards in their own colours"
    columns = {start for start, *_ in page.evaluate(_DRAWN)["columns"]}
    assert len(columns) > 80, "as many as fit, however soon the page was laid out"
    page.set_viewport_size({"width": 800, "height": 900})
    for _ in range(50):  # a busy machine lays it out late
        page.wait_for_timeout(200)
        columns = {start for start, *_ in page.evaluate(_DRAWN)["columns"]}
        if 200 < len(columns) < 240:
            break
    assert 200 < len(columns) < 240, "and of another width"
    said = page.locator(".shown").first.inner_text()
    assert "Shown: 0 ms to " in said
    assert "Single actions are too narrow to be drawn" in said
