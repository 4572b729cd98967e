"""Tables and pictures of stored results, made again from what was measured: nothing is run.

For scripts whose tables and pictures change more often than what they measure. The command, day, machine and versions
of a result stay: they are those of the measurement.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from cells import cells
from rich.console import Group
from rich.table import Table

__all__ = ["AGAIN", "made_again"]

Results = list[dict[str, Any]]


class Again(NamedTuple):
    """What a script shows of its results: its tables, and what writes its picture to a path, if it has one."""

    tables: Callable[[Any, Results], Table | Group]
    draw: Callable[[Any, Path, Results], None] | None = None


#: By job; each is given the job's script as a module, which is imported only then.
AGAIN: Final = {
    "figures_2bw": Again(
        lambda script, of: script.tables(script.by_part(of)),
        lambda script, path, of: script.draw(path, script.by_part(of)),
    ),
    "figures_ada_grouper": Again(lambda script, of: script.tables(of), lambda script, path, of: script.draw(path, of)),
    "scale": Again(lambda script, of: script.table(of), lambda script, path, of: script.draw(path, of)),
    "max_batch": Again(lambda script, of: script.tables_of(of)),
    "search_times": Again(lambda script, of: script.table(of)),
    "overhead": Again(lambda script, of: script.table(of[0])),
    "megatron_lm": Again(lambda script, of: script.table(of[0])),
    "peers": Again(lambda script, of: script.table(of), lambda script, path, of: script.draw(path, of)),
}


def made_again(name: str, document: dict[str, Any], picture: Path | None) -> str:
    """The document with new tables; the picture is drawn beside."""
    script, again = import_module(name), AGAIN[name]
    if picture is not None and again.draw is not None:
        again.draw(script, picture, document["results"])
    return json.dumps(document | {"tables": cells(again.tables(script, document["results"]))}) + "\n"
