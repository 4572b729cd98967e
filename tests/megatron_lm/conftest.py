"""Megatron-LM checkouts to run real scripts from: paths in MEGATRON_LM, separated by ':'; the main one first."""

import os
from pathlib import Path

import pytest

HOW_TO_GET_ONE = (
    "needs a Megatron-LM checkout: git clone --branch core_v0.16.1 --depth 1 https://github.com/NVIDIA/Megatron-LM, "
    "then MEGATRON_LM=$PWD/Megatron-LM (several: separate them by ':')"
)
CHECKOUTS = [Path(path).resolve() for path in os.environ.get("MEGATRON_LM", "").split(os.pathsep) if path]


def pytest_generate_tests(metafunc):
    if "megatron_lm" in metafunc.fixturenames:
        given = CHECKOUTS or [pytest.param(None, marks=pytest.mark.skip(reason=HOW_TO_GET_ONE))]
        metafunc.parametrize("megatron_lm", given, ids=lambda path: path.name if path else "none", scope="session")


def pytest_itemcollected(item):
    item.add_marker(pytest.mark.megatron_lm)


def pytest_collection_modifyitems(config, items):
    """On the first checkout everything is run, on the others what can differ between releases."""
    here = Path(__file__).parent
    left_out = [item for item in items if here in item.path.parents and _repeats(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def _repeats(item):
    first = item.callspec.params.get("megatron_lm") in (None, *CHECKOUTS[:1]) if hasattr(item, "callspec") else True
    return not first and item.get_closest_marker("every_release") is None


@pytest.fixture(scope="session")
def bert_data(tmp_path_factory):
    """Flags that make BERT read a small indexed dataset of its own."""
    from tests.megatron_lm.datasets import make_bert_data

    return make_bert_data(tmp_path_factory.mktemp("bert"))
