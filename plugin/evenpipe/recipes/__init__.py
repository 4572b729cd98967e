"""Recipes: a planned run as files that start it, written, read again and checked."""

from evenpipe.recipes.errors import RecipeError
from evenpipe.recipes.recipe import Recipe
from evenpipe.recipes.settings import Settings

__all__ = ["Recipe", "RecipeError", "Settings"]
