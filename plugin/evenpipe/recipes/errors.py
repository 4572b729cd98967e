"""What goes wrong with a recipe: one line that names what was asked for and the remedy."""

from __future__ import annotations

__all__ = ["RecipeError"]


class RecipeError(ValueError):
    """The recipe cannot be: a combination that does not exist, or a value that no file of it can carry."""
