"""Tables for people as documents keep them."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table

__all__ = ["cells"]


def cells(table: Table | Group) -> list[dict[str, Any]]:
    """What the tables say: their columns and rows."""
    every = [table] if isinstance(table, Table) else [one for one in table.renderables if isinstance(one, Table)]
    return [
        {
            "title": None if one.title is None else str(one.title),
            "columns": [str(column.header) for column in one.columns],
            "rows": [list(row) for row in zip(*(map(str, column.cells) for column in one.columns), strict=True)],
        }
        for one in every
    ]
