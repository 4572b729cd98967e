"""A picture of the page that `evenpipe demo` writes, in a browser: its run with BPipe, one action named."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from browser import NoBrowser, chromium

_WIDTH: Final = 1200
_ACTIONS: Final = 12  # that the keyboard goes through, to one of the first stage's


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--html", type=Path, default=Path("demo.html"), help="the page (default: demo.html)")
    parser.add_argument("--picture", type=Path, metavar="P.png", required=True)
    arguments = parser.parse_args()
    if not arguments.html.exists():
        parser.error(f"--html {arguments.html}: there is none: `evenpipe demo` writes it")
    try:
        with chromium() as browser:
            page = browser.new_page(viewport={"width": _WIDTH, "height": 4000}, color_scheme="light")
            page.goto(arguments.html.resolve().as_uri())
            page.wait_for_selector("html[data-ready=yes]")
            section = page.locator("section", has=page.get_by_role("heading", name="with BPipe"))
            section.get_by_role("application", name="Timeline").focus()
            for _ in range(_ACTIONS):
                page.keyboard.press("n")
            page.evaluate("scrollTo(0, 0)")  # boxes are where they are in the window
            top, end = (section.get_by_role("heading", name=name).bounding_box() for name in ("BPipe", "In numbers"))
            assert top is not None
            assert end is not None
            clip = {"x": 0, "y": top["y"] - 12, "width": _WIDTH, "height": end["y"] - top["y"]}
            page.screenshot(path=arguments.picture, full_page=True, clip=clip)  # type: ignore[arg-type]
    except NoBrowser as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
