"""Make a site of pages that are written for a checkout: the README and others beside docs/ are pages of it too.

A hook of mkdocs. Links between pages stay links; a link to what is no page, such as a script, is its text. The page of
public names gets a reference of them, from their docstrings. Flags are never broken at their hyphens.
"""

import os
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).resolve().parents[1]
#: Pages outside of docs/, and what they are called in the site.
BESIDE: Final = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "patches/README.md": "patches.md",
    "patches/TABLE.md": "patches-table.md",
    "recipes/README.md": "catalogue.md",
}
_LINK: Final = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_CODE_BLOCK: Final = re.compile(r"(<pre.*?</pre>)", re.DOTALL)
_CODE: Final = re.compile(r"(?<=<code>)[^<]*(?=</code>)")
_FENCED: Final = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, and pictures, that are not in docs/."""
    for source, name in BESIDE.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    for picture in ROOT.glob("recipes/*.png"):
        files.append(File.generated(config, picture.name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to the pages of the site, and give the public names their reference."""
    name = page.file.src_uri
    source = next((path for path, called in BESIDE.items() if called == name), f"docs/{name}")

    def led(match: re.Match[str]) -> str:
        picture, text, target, anchor = match.groups()
        path = os.path.normpath(os.path.join(os.path.dirname(source), target)).replace(os.sep, "/")
        if not (ROOT / path).exists():
            return match[0]  # which a strict build reports
        called = BESIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if called is None and picture and (ROOT / path).parent == ROOT / "recipes":
            called = Path(path).name
        if called is None or files.get_file_from_path(called) is None:
            return "" if picture else text
        return f"{picture}[{text}]({called}{anchor or ''})"

    parts = _FENCED.split(markdown)
    markdown = "".join(part if number % 2 else _LINK.sub(led, part) for number, part in enumerate(parts))
    return markdown + reference(markdown) if name == "api.md" else markdown


def reference(markdown: str) -> str:
    """Return what mkdocstrings makes a reference of, of the names in the page's table."""
    table = markdown.partition("<!-- names -->")[2].partition("<!-- end of names -->")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \|", table, re.MULTILINE)
    names = [f"{module}.{name}" for module, listed in rows for name in re.findall(r"`([a-zA-Z]\w*)`", listed)]
    return "\n\n## Reference\n\n" + "\n\n".join(f"::: {name}" for name in names) + "\n"


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Mark words with hyphens, such as flags, in code within a line: `docs/words.css` keeps them in one piece."""

    def marked(match: re.Match[str]) -> str:
        return re.sub(r"[^\s<>]*-\w[^\s<>]*", r'<span class="word">\g<0></span>', match[0])

    parts = _CODE_BLOCK.split(html)
    return "".join(part if number % 2 else _CODE.sub(marked, part) for number, part in enumerate(parts))
