"""The catalogue has all that EvenPipe replaces or calls, and what it reads from source is what an import shows."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import evenpipe
from evenpipe.megatron.supported import RELEASES
from evenpipe.megatron_lm.catalogue import catalogue, examine, version_in
from evenpipe.upstream import PRESENT, UpstreamError, signature_of
from evenpipe.upstream.findings import Item, Purpose, State
from evenpipe.upstream.source import signature_in
from evenpipe.upstream.symbols import locate, original_of

OTHER_RELEASES = [Path(path) for path in os.environ.get("EVENPIPE_MEGATRON_RELEASES", "").split(os.pathsep) if path]


@pytest.fixture(scope="module")
def site() -> Path:
    """The folder that megatron-core is installed in."""
    return Path(pytest.importorskip("megatron.core").__file__).parents[2]


def test_it_is_listed_without_megatron() -> None:
    code = """
import sys
from evenpipe.megatron_lm.catalogue import catalogue
assert len(catalogue()) > 20
assert not [name for name in sys.modules if name.partition(".")[0] == "megatron"]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_patch_set_of_the_package_is_in_it() -> None:
    listed = {item.owner for item in catalogue()}
    source = Path(evenpipe.__file__).parent / "megatron"
    made = {
        call.args[0]
        for path in source.rglob("*.py")
        if path.name != "catalogue.py"
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "PatchSet"
    }
    assert made
    for name in made:
        start = name.values[0] if isinstance(name, ast.JoinedStr) else name
        assert isinstance(start, ast.Constant)
        assert any(owner.startswith(str(start.value)) for owner in listed), ast.unparse(name)


def installed_items(site: Path) -> list[Item]:
    checked = examine(site)
    assert checked.series in RELEASES
    return [finding.item for finding in checked.findings if finding.state is not State.ABSENT]


def test_the_source_of_the_installed_release_reads_like_its_import(site: Path) -> None:
    items = [item for item in installed_items(site) if PRESENT not in item.versions.values()]
    symbols = [symbol for item in items for symbol in item.symbols]
    assert len(symbols) > 15
    read = {symbol: signature_in(site, symbol) for symbol in symbols}
    assert read == {symbol: signature_of(original_of(locate(symbol).value)) for symbol in symbols}


@pytest.mark.parametrize("root", OTHER_RELEASES, ids=lambda path: path.name)
def test_another_release_on_disk_is_supported(root: Path) -> None:
    found = examine(root)
    assert found.problems(Purpose.TRAINING) == found.problems(Purpose.CPU_MODE) == ()
    assert found.supported
    assert found.version is not None
    assert found.version.startswith(f"{found.series}.")


@pytest.fixture
def copy(site: Path, tmp_path: Path) -> Callable[[str, str, str], Path]:
    """A copy of the installed sources of megatron-core, with one text in one file replaced."""

    def edited(file: str, old: str, new: str) -> Path:
        root = tmp_path / "copy"
        shutil.copytree(site / "megatron", root / "megatron", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        path = root / "megatron" / "core" / file
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
        return root

    return edited


SCHEDULES = "pipeline_parallel/schedules.py"


def test_a_changed_signature_is_named_with_what_was_found_and_expected(copy: Callable[..., Path]) -> None:
    found = examine(copy(SCHEDULES, "def deallocate_output_tensor(out,", "def deallocate_output_tensor(output,"))
    assert not found.supported
    [line] = found.problems(Purpose.TRAINING)
    assert line == (
        f"megatron.core.pipeline_parallel.schedules:deallocate_output_tensor: megatron-core {found.version} has "
        "signature (output, deallocate_pipeline_outputs=False), expected (out, deallocate_pipeline_outputs=False): "
        "use an unmodified supported release"
    )


# By symbol: the file, a text in it, and what makes a feature die.
DEADLY = {
    "distributed.distributed_data_parallel:DistributedDataParallel.zero_grad_buffer": (
        *("distributed/distributed_data_parallel.py", "zero_grad_buffer(self)", "zero_grad_buffer(self, force)"),
    ),
    "distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.cached_param_buffer_shard_list": (
        *("distributed/param_and_grad_buffer.py", "cached_param_buffer_shard_list", "shards_that_are_kept"),
    ),
    "model_parallel_config:ModelParallelConfig.grad_scale_func": (
        *("model_parallel_config.py", "grad_scale_func", "scale_of_gradients"),
    ),
    "optimizer.distrib_optimizer:DistributedOptimizer._get_model_param_range_map": (
        "optimizer/distrib_optimizer.py",
        "def _get_model_param_range_map(self, param: torch.nn.Parameter)",
        "def _get_model_param_range_map(self, param: torch.nn.Parameter, gbuf_index: int)",
    ),
    "optimizer.optimizer:MegatronOptimizer.scale_loss": ("optimizer/optimizer.py", "def scale_loss(", "def scaled("),
    "parallel_state:get_pipeline_model_parallel_group": (
        *("parallel_state.py", "def get_pipeline_model_parallel_group(", "def get_pipeline_group("),
    ),
    "timers:Timer._active_time": ("timers.py", "_active_time", "_time_active"),
}


def test_what_any_feature_calls_or_sets_on_single_objects_is_looked_for(copy: Callable[..., Path]) -> None:
    """2bw would die in its first batches, under an unchanged schedule."""
    root = copy("transformer/moe/moe_utils.py", "def clear_aux_losses_tracker(", "def clear_losses(")
    for file, old, new in DEADLY.values():
        path = root / "megatron" / "core" / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    found = examine(root)
    assert not found.supported
    lines = found.problems(Purpose.TRAINING)
    named = {line.split(": ")[0].removeprefix("megatron.core.") for line in lines}
    assert named == {*DEADLY, "transformer.moe.moe_utils:clear_aux_losses_tracker"}
    [sharded] = [line for line in lines if "_get_model_param_range_map" in line]
    assert "has signature (self, param, gbuf_index), expected (self, param): use an unmodified" in sharded


def test_what_only_the_trainer_calls_keeps_a_checkout_from_being_supported(copy: Callable[..., Path]) -> None:
    found = examine(copy("models/gpt/__init__.py", "import GPTModel", "import GPTModel as Model"))
    assert not found.supported
    assert found.problems(Purpose.TRAINING) == ()
    [line] = found.problems(Purpose.TRAINER)
    assert line.startswith("megatron.core.models.gpt:GPTModel: ")


def test_what_only_cpu_mode_needs_does_not_keep_a_checkout_from_training(copy: Callable[..., Path]) -> None:
    found = examine(copy("pipeline_parallel/p2p_communication.py", "def _p2p_ops(", "def _p2p_operations("))
    assert found.supported
    [line] = found.problems(Purpose.CPU_MODE)
    assert line.startswith("megatron.core.pipeline_parallel.p2p_communication:_p2p_ops: ")


def with_version(root: Path, text: str) -> Path:
    folder = root / "megatron" / "core"
    folder.mkdir(parents=True)
    (folder / "package_info.py").write_text(text)
    return root


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("MAJOR = 0\nMINOR = 13\nPATCH = 1\nPRE_RELEASE = ''\n", "0.13.1"),
        ("MAJOR = 0\nMINOR = 20\nPATCH = 0\nPRE_RELEASE = 'rc1'\n", "0.20.0rc1"),
    ],
)
def test_another_version_is_refused_before_anything_else_is_read(tmp_path: Path, text: str, version: str) -> None:
    root = with_version(tmp_path, text)
    assert version_in(root) == version
    found = examine(root)
    assert (found.supported, found.version, found.series, found.findings) == (False, version, None, ())
    [line] = found.problems(Purpose.TRAINING)
    assert line.startswith(f"megatron-core {version}: unknown release, expected one of {', '.join(RELEASES)}")


def test_a_version_that_is_not_stated_is_refused(tmp_path: Path) -> None:
    root = with_version(tmp_path, "__version__ = '0.16.1'\n")
    with pytest.raises(UpstreamError, match=r"^megatron\.core\.package_info:MAJOR: "):
        version_in(root)
    assert not examine(root).supported
