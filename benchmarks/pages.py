"""Pages that show stored results: `docs/benchmarks.md`, and the parts of others that a template of the same name makes.

A part stands between `<!-- NAME: ... -->` and `<!-- end of NAME -->`; NAME.md.j2 in `benchmarks/templates` makes it.
"""

from __future__ import annotations

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jobs import JOBS, ROOT
from published.two_bw import QUALITY, SHARE

__all__ = ["RESULTS", "pages", "stored"]

RESULTS: Final = ROOT / "benchmarks" / "results"
_PART: Final = re.compile(r"(<!-- (?P<name>[\w-]+): [^\n]*-->\n)(.*?)(<!-- end of (?P=name) -->\n)", re.DOTALL)
#: Scripts whose results are times.
_TIMED: Final = frozenset(Path(job.command[0]).stem for job in JOBS if job.timed)


def stored() -> dict[str, dict[str, Any]]:
    """The documents of all results, by the name of the job that made them."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def pages(results: dict[str, dict[str, Any]]) -> dict[Path, str]:
    """What pages with parts are to say, by their path."""
    environment = Environment(
        loader=FileSystemLoader(ROOT / "benchmarks" / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"at_least": _at_least, "number": _number, "change": _change, "percent": _percent}
    environment.globals |= {"origin": _origin, "table": _table, "pivot": _pivot, "some": _some}
    environment.globals |= {"results": results, "row": partial(_row, results)}
    environment.globals |= {"jobs": JOBS, "paper": QUALITY, "share": SHARE}
    found = dict[Path, str]()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text()
        if _PART.search(text):
            found[path] = _PART.sub(lambda part: part[1] + _made(environment, part["name"]) + part[4], text)
    return found


def _made(environment: Environment, name: str) -> str:
    return environment.get_template(f"{name}.md.j2").render()


def _origin(document: dict[str, Any]) -> str:
    """Return the command, the day, the machine and the versions; and what makes the result less than it could be.

    That is a tree with changes that were not committed, and times that were taken on a busy machine.
    """
    machine = document["machine"]
    what = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    where = f"{machine['cpus']} cores ({machine['processor']}), load {machine['load_before']} before"
    busy = machine["load_before"] > machine["cpus"] and document["name"] in _TIMED
    base, dirty, _ = document["versions"]["evenpipe"].partition("-dirty")
    changed = f" **Not of a commit**: the tree was {base} with changes that were not committed." if dirty else ""
    warning = " **Timed on a busy machine**: the load before was above its cores." if busy else ""
    return f"`{document['command']}`, {document['date']}, {where}; {what}.{changed}{warning}"


def _row(results: dict[str, dict[str, Any]], name: str, **keys: Any) -> dict[str, Any]:
    """The one among a document's results that has these values. Raises LookupError where there is none, or several."""
    found = [row for row in results[name]["results"] if all(row.get(key) == value for key, value in keys.items())]
    if len(found) != 1:
        raise LookupError(f"{name}.json: {len(found)} results have {keys}")
    return found[0]


def _table(table: dict[str, Any]) -> str:
    """In Markdown."""
    rows = [table["columns"], ["---"] * len(table["columns"]), *table["rows"]]
    lines = ("| " + " | ".join(cell.replace("\n", " ").replace("|", "\\|") for cell in row) + " |" for row in rows)
    title = [] if table["title"] is None else [f"{table['title']}:", ""]
    return "\n".join([*title, *lines, ""])


def _pivot(table: dict[str, Any], down: list[str], across: list[str], cell: str, at: str = "{}") -> str:
    """Return the table in Markdown with a line for each value of `down` and a column for each of `across`.

    `cell` is a format with the other columns' names; rows that meet in a cell stand one after another. An empty value
    in `down` or `across` is the one above it. `at` formats the values of `across` as a column's title.
    """
    above: dict[str, str] = {}
    cells: dict[tuple[str, ...], dict[str, list[str]]] = {}
    titles: dict[str, None] = {}
    for values in table["rows"]:
        row = dict(zip(table["columns"], values, strict=True))
        above = {key: row[key] or above.get(key, "") for key in (*down, *across)}
        title = at.format(*(above[key] for key in across))
        titles[title] = None
        line = cells.setdefault(tuple(above[key] for key in down), {})
        line.setdefault(title, []).append(cell.format_map(row).strip())
    rows = [[*keys, *(", ".join(line.get(title, ["–"])) for title in titles)] for keys, line in cells.items()]
    return _table({"title": table["title"], "columns": [*down, *titles], "rows": rows})


def _some(table: dict[str, Any], column: str, values: list[str]) -> dict[str, Any]:
    """Return the table's rows with one of these values in a column."""
    at = table["columns"].index(column)
    return table | {"rows": [row for row in table["rows"] if row[at] in values]}


def _number(value: float, digits: int = 0) -> str:
    return f"{value:,.{digits}f}"


def _at_least(value: float, digits: int) -> str:
    """Cut off and not rounded: what misses a bound does not look as if it reached it."""
    return _number(math.floor(value * 10**digits) / 10**digits, digits)


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def _change(share: float, digits: int = 1) -> str:
    """A share that may be negative, with its sign."""
    return f"{'−' if share < 0 else '+'} {abs(100 * share):.{digits}f} %"
