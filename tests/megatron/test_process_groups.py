"""A schedule is given a communicator and groups of one model's pipeline, or neither."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron.core import process_groups_config
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from evenpipe.megatron.schedule import process_groups
from evenpipe.megatron.supported import installed_release

RELEASE = installed_release()
GROUPS = getattr(process_groups_config, RELEASE.process_groups_class.partition(":")[2])
COMMUNICATOR = object.__new__(P2PCommunicator)  # making one looks its process group up


def test_what_is_given_is_taken() -> None:
    groups = GROUPS()
    assert process_groups(RELEASE, COMMUNICATOR, groups) is groups


def several_modules() -> Any:
    """The groups of a pipeline of several modules, which megatron-core has from 0.17 on."""
    kind = getattr(process_groups_config, "MultiModuleProcessGroupCollection", None)
    if kind is None:
        pytest.skip(f"megatron-core {RELEASE.series} has no pipelines of several modules")
    return kind({"language": GROUPS()})


def test_a_pipeline_of_several_modules_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^pg_collection: .* got a MultiModuleProcessGroupCollection: leave") as error:
        process_groups(RELEASE, COMMUNICATOR, several_modules())
    assert "\n" not in str(error.value)


def test_what_is_neither_megatrons_communicator_nor_its_groups_is_refused_by_name() -> None:
    argument = RELEASE.process_groups_argument
    with pytest.raises(ValueError, match=r"^p2p_communicator: .* with a P2PCommunicator, and got a SimpleNamespace: "):
        process_groups(RELEASE, SimpleNamespace(), GROUPS())
    with pytest.raises(ValueError, match=rf"^{argument}: .* with a {GROUPS.__name__}, and got a SimpleNamespace: "):
        process_groups(RELEASE, COMMUNICATOR, SimpleNamespace())
