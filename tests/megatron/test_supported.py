"""What is recorded of each supported megatron-core release is what that release has."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

import megatron.core
from megatron.core.pipeline_parallel import schedules
from megatron.core.timers import Timers

from evenpipe.megatron.supported import MEGATRON_CORE, RELEASES, CoreRelease, installed_release, recorded, since
from evenpipe.upstream import UpstreamError, signature_of

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
OTHER_RELEASES = [Path(path) for path in os.environ.get("EVENPIPE_MEGATRON_RELEASES", "").split(os.pathsep) if path]


def test_the_installed_release_is_supported_and_as_recorded() -> None:
    release = installed_release()
    assert megatron.core.__version__.startswith(f"{release.series}.")
    assert release.signatures[f"{SCHEDULES}:backward_step"] == signature_of(schedules.backward_step)


def test_timers_tell_their_level() -> None:
    """Which says whether hosts wait for their devices."""
    assert Timers(log_level=2, log_option="minmax")._log_level == 2


@pytest.mark.parametrize("path", OTHER_RELEASES, ids=str)
def test_another_release_on_disk_is_supported_and_as_recorded(path: Path) -> None:
    """Every signature is verified in a process of its own, which imports megatron from `path`."""
    program = (
        "import megatron.core; from evenpipe.megatron.supported import installed_release; "
        "from megatron.core.timers import Timers; assert Timers(2, 'minmax')._log_level == 2; "
        "print(megatron.core.__file__, installed_release().series, megatron.core.__version__)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    file, series, version = done.stdout.splitlines()[-1].split()
    assert Path(file).is_relative_to(path)
    assert version.startswith(f"{series}.")


@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES)
def test_the_schedules_take_what_their_release_says(release: CoreRelease) -> None:
    for kind in ("without_interleaving", "with_interleaving"):
        signature = release.signatures[f"{SCHEDULES}:forward_backward_pipelining_{kind}"]
        assert f"{release.process_groups_argument}=None" in signature
        assert ("force_all_reduce" in signature) == release.takes_force_all_reduce
    assert release.process_groups_class in release.signatures


def test_what_changed_between_releases() -> None:
    """Which series take what; every other test sees one of them only."""

    def those(takes: Callable[[CoreRelease], bool]) -> list[str]:
        return [series for series, release in RELEASES.items() if takes(release)]

    assert those(lambda release: release.takes_force_all_reduce) == ["0.16", "0.17", "0.18", "0.19"]
    assert those(lambda release: release.backward_takes("model_type")) == ["0.14", "0.15", "0.16"]
    assert those(lambda release: release.backward_takes("pipeline_model_parallel_size")) == ["0.14"]
    assert those(lambda release: "tp_dp_cp" in release.process_groups) == ["0.18", "0.19"]
    assert those(lambda release: "dp" in release.process_groups) == ["0.19"]


@pytest.mark.parametrize(
    "version", ["0.13.1", "0.20.0", "0.160.0", "1.0.0", "0.16.0rc0", "0.17.0rc1+5a6b7c8", "0.18.0.dev0"]
)
def test_other_releases_and_what_comes_before_a_release_are_refused(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(megatron.core, "__version__", version)
    with pytest.raises(UpstreamError) as error:
        installed_release()
    known = "0.14, 0.15, 0.16, 0.17, 0.18, 0.19"
    assert str(error.value) == (
        f"megatron-core {version}: unknown release, expected one of {known}: install one of these"
    )


@pytest.mark.parametrize("suffix", ["", "+5a6b7c8", ".post1"])
def test_a_release_is_known_by_its_series_whatever_its_build(monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    release = installed_release()
    monkeypatch.setattr(megatron.core, "__version__", f"{release.series}.7{suffix}")
    assert installed_release() == release


def test_a_symbol_is_recorded_for_the_series_that_have_it() -> None:
    groups = "megatron.core.process_groups_config"
    assert set(recorded(f"{SCHEDULES}:get_forward_backward_func")) == set(RELEASES)
    assert set(recorded(f"{groups}:GradFinalizeProcessGroups")) == {"0.14"}
    assert since({"0.16": "(a)", "0.17": "(a, b)", "0.18": None}) == {"0.16": "(a)", "0.17": "(a, b)"}
    assert MEGATRON_CORE.series(recorded(f"{SCHEDULES}:backward_step")) == installed_release().series
