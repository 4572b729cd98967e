"""The page of a real run in a browser: what a reader sees, points at, and does with a keyboard."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, Locator, Page, TimeoutError, ViewportSize

from evenpipe.cli.main import main
from evenpipe.schedule import COMPUTE, KINDS

Open = Callable[..., Page]
_FRAME = """() => {
  const view = [...Bokeh.index.roots].find((one) => one.model.name === "micro-batches in time");
  const { left, top, width, height } = view.frame.bbox;
  return [left, top, width, height];
}"""
_RANGES = """() => [...Bokeh.index.roots].filter((one) => one.model.x_range)
  .map((one) => [one.model.x_range.start, one.model.x_range.end])"""

_SELECTED = """() => [...Bokeh.index.roots].flatMap((one) => one.model.renderers ?? [])
  .map((one) => one.data_source).filter((one) => one.selected.indices.length > 0).map((one) => one.name)"""

#: Of an element, the colours of its text and of what is behind it, each [r, g, b].
_COLOURS = """(one) => {
  let behind = one;
  const paper = () => getComputedStyle(behind).backgroundColor;
  while (paper() === "rgba(0, 0, 0, 0)") behind = behind.parentElement ?? behind.getRootNode().host;
  return [getComputedStyle(one).color, paper()].map((colour) => colour.match(/\\d+/g).slice(0, 3).map(Number));
}"""
#: Of the timeline: how opaque its boxes are and its very edge, and the colours of its paper and its numbers.
_DRAWN = """() => {
  const view = [...Bokeh.index.roots].find((one) => one.model.name === "micro-batches in time");
  const numbers = view.model.renderers.find((one) => one.name === "numbers");
  const edge = view.canvas_view.primary.canvas.getContext("2d").getImageData(0, 0, 4, 4).data;
  return {
    edge: Math.max(...edge),
    alphas: [...view.model.document.get_model_by_name("actions").data.alpha].sort(),
    paper: view.model.background_fill_color,
    number: numbers.glyph.text_color.value,
  };
}"""


class Pages(NamedTuple):
    """How to open a page, the pages that nobody changes, and what was wrong with any."""

    anew: Open
    shared: dict[tuple[int, str], Page]
    complaints: list[str]


@pytest.fixture(scope="module")
def pages(browser: Browser, run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """Pages of the run, from disk: errors on their consoles and requests are complaints."""
    out = tmp_path_factory.mktemp("page") / "out.html"
    assert main(["report", str(run), "--html", str(out)]) == 0
    complaints: list[str] = []
    opened: list[Page] = []

    def anew(width: int = 1280, scheme: str = "light", touch: bool = False) -> Page:
        size: ViewportSize = {"width": width, "height": 900}
        page = browser.new_page(viewport=size, color_scheme=scheme, has_touch=touch)  # type: ignore[arg-type]
        page.on("console", lambda one: complaints.append(one.text) if one.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        own = out.as_uri()
        page.on("request", lambda one: None if one.url.startswith((own, "data:")) else complaints.append(one.url))
        page.goto(own)
        page.wait_for_selector("html[data-ready=yes]", timeout=30_000)
        opened.append(page)
        return page

    yield Pages(anew, {}, complaints)
    for page in opened:
        page.close()


@pytest.fixture
def opened(pages: Pages) -> Iterator[Open]:
    """Opens a page; in the end nothing was wrong with it."""
    yield pages.anew
    found = [*pages.complaints]
    pages.complaints.clear()
    assert found == []


@pytest.fixture
def seen(pages: Pages, opened: Open) -> Open:
    """Gives a page, at its top, that all share who only look and point at it."""

    def shared(width: int = 1280, scheme: str = "light") -> Page:
        if (width, scheme) not in pages.shared:
            pages.shared[width, scheme] = opened(width, scheme)
        page = pages.shared[width, scheme]
        page.evaluate("scrollTo(0, 0)")
        return page

    return shared


def place_of(page: Page, stage: float, at_ms: float) -> tuple[float, float]:
    """Where on the screen a time is, and a height in rows of stages."""
    page.locator("#timeline-0").scroll_into_view_if_needed()
    box = page.locator("#timeline-0").bounding_box()
    assert box is not None
    left, top, width, height = page.evaluate(_FRAME)
    start, end = page.evaluate(_RANGES)[0]
    across, down = (at_ms - start) / (end - start), (stage + 0.06) / 2.06
    return box["x"] + left + width * across, box["y"] + top + height * down


def point_at(page: Page, stage: float, at_ms: float) -> None:
    """Move the mouse there."""
    x, y = place_of(page, stage, at_ms)
    page.mouse.move(x - 5, y)
    page.mouse.move(x, y, steps=3)


def tip_of(page: Page, of: tuple[int, str, float]) -> Locator:
    """What the page says of an action that the mouse points at: again while a busy browser still lays out the page."""
    stage, action, middle = of
    tip = page.locator(".tip", has_text=f"{action}: ")
    for patience_ms in (1000, 2000, 4000, 8000):
        point_at(page, stage + 0.18, middle)
        with suppress(TimeoutError):
            tip.wait_for(state="attached", timeout=patience_ms)
            return tip
    raise AssertionError(f"no tooltip of {action} on stage {stage}")


def widest(run: Path, letter: str, stages: Sequence[int] = (0, 1)) -> tuple[int, str, float]:
    """The stage, the name and the middle of the longest action of a kind: a stall makes all others thin."""
    timeline = json.loads(run.read_text())["timeline"]
    spans = [(stage, span) for stage in stages for span in timeline[stage] if span["action"].startswith(letter)]
    stage, span = max(spans, key=lambda one: one[1]["end_ms"] - one[1]["start_ms"])
    return stage, span["action"], (span["start_ms"] + span["end_ms"]) / 2


def test_the_first_screen_has_the_timeline(seen: Open) -> None:
    box = seen().locator("#timeline-0").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= 900
    narrow = seen(400).locator("#timeline-0").bounding_box()
    assert narrow is not None
    assert narrow["y"] <= 1000


def test_all_is_shown_to_the_end_of_the_slower_of_measured_and_predicted(seen: Open, run: Path) -> None:
    """The end of the predicted row was once taken for that of both."""
    page = seen()
    page.locator("#timeline-0").scroll_into_view_if_needed()
    page.wait_for_function("document.querySelector('.shown').textContent !== ''")
    shown, last = re.findall(r"([\d,.]+) ms", page.locator(".shown").first.inner_text())[1:3]
    assert shown == last
    measured = max(span["end_ms"] for stage in json.loads(run.read_text())["timeline"] for span in stage)
    assert float(last.replace(",", "")) >= measured - 0.01


def test_every_action_is_named_where_the_mouse_points(seen: Open, run: Path) -> None:
    page = seen()
    for at in (0, 1):
        for letter in "FB":
            tip = tip_of(page, widest(run, letter, [at]))
            tip.wait_for(timeout=5000)
            assert f"stage {at}, measured" in tip.inner_text()


@pytest.mark.parametrize("width", [1280, 400])
def test_no_tooltip_is_cut_off(seen: Open, run: Path, width: int) -> None:
    """On a narrow page there is none: the line below the chart has room for what a tap names."""
    tip = tip_of(seen(width), widest(run, "B"))
    assert tip.is_visible() == (width > 600)


@pytest.mark.parametrize("width", [1280, 400])
def test_a_tap_or_a_click_names_the_action_and_dims_nothing(opened: Open, run: Path, width: int) -> None:
    page, document = opened(width, touch=True), json.loads(run.read_text())
    status, stage = page.locator("[role=status]"), document["timeline"][1]
    first = min(stage, key=lambda span: span["start_ms"])
    for act in (page.touchscreen.tap, page.mouse.click):
        x, y = place_of(page, 1.18, first["start_ms"])
        act(x - 6, y)  # few fingers hit a box of three pixels
        assert status.inner_text().startswith(f"{first['action']}: forward of micro-batch 0, stage 1, measured, ")
        page.locator("#memory-0").click()
        # Where something is selected, Bokeh dims the rest of its kind.
        assert page.evaluate(_SELECTED) == ["actions"]
        page.locator("#timeline-0").click(position={"x": 20, "y": 5})
        assert status.inner_text() == ""
        assert page.evaluate(_SELECTED) == []


def test_the_wheel_and_the_buttons_zoom_both_charts(opened: Open) -> None:
    page = opened()
    whole = page.evaluate(_RANGES)
    assert whole[0] == whole[1]
    page.locator("[data-chart=timeline] button", has_text="Zoom in").click()
    nearer = page.evaluate(_RANGES)
    assert nearer[0] == nearer[1]
    assert nearer[0][0] > whole[0][0]
    assert nearer[0][1] < whole[0][1]
    page.locator("[data-chart=memory] button", has_text="All").click()
    assert page.evaluate(_RANGES)[0] == pytest.approx(whole[0])
    point_at(page, 0.5, (whole[0][0] + whole[0][1]) / 2)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -400)
    page.keyboard.up("Control")
    page.wait_for_function(f"() => ({_RANGES})()[0][1] < {whole[0][1]}")


def test_all_can_be_done_with_a_keyboard(opened: Open) -> None:
    page = opened()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "timeline-0":
            break
    assert page.evaluate("document.activeElement.id") == "timeline-0"
    # Else a screen reader that browses keeps the keys to itself.
    assert page.evaluate("document.activeElement.role") == "application"
    whole, status = page.evaluate(_RANGES), page.locator("[role=status]")
    page.keyboard.press("n")
    assert status.inner_text().startswith("F0: forward of micro-batch 0, stage 0, measured, ")
    page.keyboard.press("n")
    assert status.inner_text().startswith("F1: ")
    page.keyboard.press("ArrowDown")
    assert ", stage 1, measured, " in status.inner_text()
    page.keyboard.press("p")
    page.keyboard.press("+")
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    moved = page.evaluate(_RANGES)
    assert moved[0][1] - moved[0][0] < whole[0][1] - whole[0][0]
    page.keyboard.press("0")
    assert page.evaluate(_RANGES)[0] == pytest.approx(whole[0])
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Zoom in", "the drawing itself is no stop"


def test_a_screen_reader_finds_landmarks_names_and_tables(seen: Open) -> None:
    page = seen()
    for landmark in ("main", "header", "footer", "h1", "html[lang=en]"):
        assert page.locator(landmark).count() == 1, landmark
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map((one) => Number(one.tagName[1]))")
    assert all(after - before <= 1 for before, after in pairwise(levels))
    unnamed = "(one) => !(one.getAttribute('aria-label') || one.textContent.trim())"
    assert page.evaluate(f"[...document.querySelectorAll('button,[tabindex=\"0\"],a')].filter({unnamed}).length") == 0
    table = page.locator("details", has_text="All actions").locator("table").first
    assert table.locator("caption").text_content() == "Actions of stage 0, times in milliseconds"
    assert table.locator("tbody tr").count() == len(table.locator("tbody th[scope=row]").all_text_contents())
    assert "B3" in table.locator("tbody th").all_text_contents()


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off(seen: Open, width: int, scheme: str) -> None:
    page = seen(width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    colours = page.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    text, paper = (sum(map(int, colour.removeprefix("rgb(").rstrip(")").split(","))) for colour in colours)
    assert (text > paper) == (scheme == "dark")


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    """WCAG 2's contrast ratio of two colours in [0, 255]."""

    def luminance(colour: Sequence[float]) -> float:
        linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return sum(part * weight for part, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tooltips_and_messages_follow_the_scheme(seen: Open, run: Path, scheme: str) -> None:
    page = seen(1280, scheme)

    def reads(said: Locator) -> None:
        said.wait_for(timeout=5000)
        text, paper = said.evaluate(_COLOURS)
        assert (sum(text) > sum(paper)) == (scheme == "dark")
        assert contrast(text, paper) >= 4.5

    reads(tip_of(page, widest(run, "B")))
    page.mouse.wheel(0, 1)  # the page scrolls under the mouse, and the tooltip may go
    reads(page.get_by_text("use ctrl + scroll to zoom"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_numbers_are_read_on_predicted_boxes_and_nothing_is_drawn_around(seen: Open, scheme: str) -> None:
    drawn = seen(1280, scheme).evaluate(_DRAWN)
    assert drawn["edge"] == 0
    assert drawn["alphas"][0] < 1, "the predicted are fainter"
    paper, number = (bytes.fromhex(drawn[name][1:]) for name in ("paper", "number"))
    for letter in COMPUTE:
        colour = bytes.fromhex(KINDS[letter].colour[1:])
        faint = drawn["alphas"][0]
        assert contrast(number, [faint * c + (1 - faint) * p for c, p in zip(colour, paper, strict=True)]) >= 4.5


def test_hostile_settings_are_text(seen: Open) -> None:
    page = seen()
    assert page.title() == "Run – EvenPipe"
    assert page.locator("img").count() == 0
    page.locator("summary", has_text="Settings").click()
    assert "document.title='taken over'" in page.locator("dl.pairs").first.inner_text()
