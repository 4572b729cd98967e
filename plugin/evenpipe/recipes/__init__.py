"""Recipes: a planned run as files that start it, written, read again and checked."""

from evenpipe.recipes.recipe import Recipe, RecipeError, Settings

__all__ = ["Recipe", "RecipeError", "Settings"]
