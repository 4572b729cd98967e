"""What `recipes/` has is what the generator writes today, pictures included."""

from __future__ import annotations

import matplotlib.image
import numpy as np
import pytest

from evenpipe.recipes.files import files_of
from recipes.regenerate import CATALOGUE, HERE, PICTURE, catalogue, draw_entry, recipe_of

REMEDY = "python -m recipes.regenerate"


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.folder)
def test_files_and_picture_are_what_is_written_today(entry, tmp_path):
    recipe = recipe_of(entry)
    folder = HERE / entry.folder
    written = files_of(recipe)
    assert {path.name for path in folder.iterdir()} == {*written, PICTURE}, REMEDY
    for name, text in written.items():
        assert (folder / name).read_text() == text, f"{entry.folder}/{name}: {REMEDY}"
    draw_entry(recipe, tmp_path / PICTURE)
    kept, drawn = (matplotlib.image.imread(path / PICTURE) for path in (folder, tmp_path))
    assert kept.shape == drawn.shape, REMEDY
    assert np.abs(kept - drawn).mean() < 0.01, f"{entry.folder}/{PICTURE}: {REMEDY}"
    assert (folder / PICTURE).stat().st_size < 100_000


def test_the_page_names_every_folder_and_no_other():
    assert (HERE / "README.md").read_text() == catalogue(), REMEDY
    assert {path.name for path in HERE.iterdir() if path.is_dir() and path.name[0] not in "_."} == {
        entry.folder for entry in CATALOGUE
    }


def test_all_of_them_fit():
    assert all(recipe_of(entry).estimate.fits for entry in CATALOGUE)
