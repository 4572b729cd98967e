"""Descriptions: each constant has a source, models have as many parameters as they are named for, errors say where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.descriptions import DescriptionError, cluster, device, framework, model, names, node_of
from evenpipe.planner.estimate import Estimator
from evenpipe.planner.kernels import FITTED, Links
from evenpipe.planner.operations.parts import Blocks, parts_of
from evenpipe.planner.run import Run
from evenpipe.planner.stage_bytes import parameters_of

KEYS = ["layers", "hidden", "heads", "sources", "experts", "own", "defaults", "vocabulary", "sequence"]
READ = {"models": model, "devices": device, "clusters": cluster, "frameworks": framework}

#: 10^9 parameters, as published; BERT's are without its pooler.
PUBLISHED = {
    "gpt3-13b": 13.0,
    "gpt3-96b": 96.2,
    "gpt3-134b": 134.5,
    "gpt3-175b": 174.6,
    "megatron-530b": 529.6,
    "megatron-1t": 1008.0,
    "gpt2-355m": 0.355,
    "gpt2-1.3b": 1.3,
    "gpt2-2.2b": 2.2,
    "gpt2-3.8b": 3.8,
    "bert-large": 0.336,
    "bert-48": 0.6698,
    "bert-3.8b": 3.9,
    "gpt-large": 0.76,
    "gpt-xl": 1.3,
    "llama3-8b": 8.03,
    "llama3-70b": 70.6,
    "llama3-405b": 405.9,
    "mixtral-8x7b": 46.7,
    "deepseek-v3": 671.0,
    "qwen3-8b": 8.19,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.0,
    "kimi-k2": 1040.0,
    "moonlight-16b-a3b": 15.96,
    "glm-4.5": 355.0,
    "nemotron-4-340b": 341.0,
    "gpt-oss-120b": 116.8,
    "llama4-scout": 109.0,
    "llama4-maverick": 400.0,
}


def test_every_constant_of_the_package_has_a_source() -> None:
    for room, read in READ.items():
        for found in map(read, names(room)):
            assert "all" in found.sources or found.model_fields_set - {"name", "sources"} <= {*found.sources}, found


#: A publication, or the file, to look a constant up in, with the place where it stands.
_PLACE = re.compile(r"(Table|§|Figure|\.py|Narayanan|Ethernet|DeepSpeed 0|Megatron-Core 0)")


def test_a_source_of_all_else_is_one_that_all_else_can_be_looked_up_in() -> None:
    sources = {(room, name): READ[room](name).sources for room in READ for name in names(room)}
    assert [one for one, of in sources.items() if not _PLACE.search(of.get("all", "§"))] == [], "name a section"
    having = [name for (room, name), of in sources.items() if room == "devices" and "all" in of]
    assert having == [], "a device's constants have a source each"


def test_models_have_the_parameters_that_they_are_known_for() -> None:
    run, found = Run(global_batch=1, precision="fp16", attention="flash"), {}
    for name in PUBLISHED:
        of = model(name).model_copy(update={"mtp_layers": 0})
        found[name] = sum(parameters_of(part, Blocks(of, run)).all for part in parts_of(of, run)) / 1e9
    assert found == pytest.approx(PUBLISHED, rel=0.03)


@given(st.sampled_from(names("models")), st.integers(1, 2**20))
def test_another_sequence_has_the_positions_that_it_needs(name: str, tokens: int) -> None:
    of = model(name).model_copy(update={"max_positions": 1024})
    longer = of.of_sequence(tokens)
    assert (longer.sequence, longer.max_positions) == (tokens, max(1024, tokens))
    assert model(name).of_sequence(tokens).max_positions in (0, max(model(name).max_positions, tokens))
    assert longer.of_sequence(of.sequence).model_copy(update={"max_positions": 1024}) == of


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(DescriptionError, match=r"gpt3-69b: unknown among models, did you mean gpt3-96b\?"):
        model("gpt3-69b")
    with pytest.raises(DescriptionError, match="4x8-a100-80: unknown among clusters, did you mean"):
        cluster("4x8-a100-80")


def test_a_size_before_a_cluster_s_name_is_its_size() -> None:
    assert (cluster("4x8-a100-80gb").gpus, cluster("a100-80gb").gpus) == (32, 8)
    assert cluster("2x4-h100").device == device("h100")


def test_a_user_s_own_file_describes_what_the_package_does_not(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "defaults: {vocabulary: 32000, sequence: 1024}\n"
        "models:\n  small: {layers: 2, hidden: 64, heads: 4}\n  wide: {layers: 2, hidden: 128, heads: 4, ffn: 256}\n"
    )
    assert model(f"{own}:wide").ffn == 256
    assert model(f"{own}:small").ffn == 4 * 64
    with pytest.raises(DescriptionError, match="describes small, wide: say which"):
        model(str(own))
    nodes = tmp_path / "nodes.yaml"
    nodes.write_text(
        "clusters: {ours: {nodes: 2, gpus_per_node: 4, device: a100-40gb, node_gbps: 3.0, latency_us: 20.0, "
        "node_latency_us: 30.0}}"
    )
    assert (cluster(str(nodes)).gpus, cluster(str(nodes)).peer_gbps) == (8, device("a100-40gb").peer_gbps)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "models: {own: {layrs: 2, hidden: 64, heads: 4, vocabulary: 9, sequence: 8, layers: 1}}",
            r"own\.layrs: unknown key, did you mean layers\?",
        ),
        (
            "models: {own: {layers: 2, hidden: 64, heads: 4, vocabulary: 9, sequence: 8, "
            "experts: {count: 4, chosen: 1, fn: 3}}}",
            r"own\.experts\.(ffn|fn): (unknown key, did you mean ffn\?|is missing)",
        ),
        (
            "models: {own: {layers: two, hidden: 64, heads: 4, vocabulary: 9, sequence: 8}}",
            r"own\.layers: must be",
        ),
        ("models: {own: {layers: 2, hidden: 64, heads: 5, vocabulary: 9, sequence: 8}}", "hidden=64 does not divide"),
        ("modles: {own: {}}", "has no models"),
        ("models: [1, 2", "is no YAML"),
        pytest.param("models: " + "[" * 20000, "is nested too deeply", id="deep"),
        ("models: {own: 3}", r"models\.own: is 3: write keys"),
        ("models: {own: {sources: text}}", r"models\.own\.sources: is 'text': write a source under each key"),
        ("defaults: {sources: [1]}\nmodels: {own: {layers: 2}}", r"defaults\.sources: is \[1\]: write a source"),
        (
            "models: {own: {layers: 2, hidden: 64, heads: 4, vocabulary: 9, sequence: 8, sources: {layrs: x}}}",
            r"sources\.layrs: is no key of it",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_path(tmp_path: Path, text: str, said: str) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(text)
    with pytest.raises(DescriptionError, match=said) as caught:
        model(str(own))
    assert str(caught.value).startswith(str(own))
    assert "\n" not in str(caught.value)


DEVICE = (
    "devices: {own: {tflops: {bf16: %s}, multiprocessors: 8, memory_gib: 8, reserve_gib: 1, memory_gbps: %s, "
    "peer_gbps: 9, host_gbps: 9, launch_us: 4, attention: [%s, 0.5]}}"
)


@pytest.mark.parametrize(
    ("rate", "memory", "attention", "said"),
    [
        ("0", "900", "0.5", r"own\.tflops\.bf16: must be greater than 0"),
        (".nan", "900", "0.5", r"own\.tflops\.bf16: must be a finite number"),
        ("90", "0", "0.5", r"own\.memory_gbps: must be greater than 0"),
        ("90", "900", "0", r"own\.attention\.0: must be greater than 0"),
        ("90", "900", "58", r"own\.attention\.0: must be less than or equal to 1"),
    ],
)
def test_a_device_that_computes_nothing_is_none(
    tmp_path: Path, rate: str, memory: str, attention: str, said: str
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(DEVICE % (rate, memory, attention))
    with pytest.raises(DescriptionError, match=said):
        device(str(own))


TEXT = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["all", "text", "layers", "sources", "own"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["models", "defaults", "own"]), TEXT, max_size=3))
def test_whatever_a_file_has_is_a_description_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, said: object
) -> None:
    own = tmp_path_factory.mktemp("own") / "own.yaml"
    own.write_text(yaml.safe_dump(said))
    line = f"{own}: fine"
    try:
        model(str(own))
    except DescriptionError as error:
        line = str(error)
    assert line.startswith(str(own))
    assert "\n" not in line


def test_a_node_with_fewer_gpus_has_the_same_adapters() -> None:
    whole, half, one = (cluster(f"2x{gpus}-a100-80gb") for gpus in (8, 4, 1))
    assert (whole.node_gbps, half.node_gbps) == (12.5, 25.0)
    assert one.node_gbps == device("a100-80gb").host_gbps, "no more than a GPU's own link carries"
    assert cluster("1x16-a100-80gb").node_gbps == 6.25


OWN = (
    "clusters: {ours: {nodes: 2, gpus_per_node: 8, device: h100, node_gbps: 25.0, latency_us: 20.0, "
    "node_latency_us: 30.0}}"
)


def test_a_size_after_a_cluster_of_a_file_is_its_size(tmp_path: Path) -> None:
    own = tmp_path / "2x4-mine@home.yaml"
    own.write_text(OWN)
    assert (cluster(f"{own}:ours").nodes, cluster(f"{own}:ours").gpus_per_node) == (2, 8), "no size is in a file's name"
    sized = cluster(f"{own}:ours@16x4")
    assert (sized.name, sized.nodes, sized.gpus_per_node) == (f"{own}:ours@16x4", 16, 4)
    assert sized.node_gbps == 50.0, "its adapters are shared by half as many"
    assert cluster(f"{own}@3x8").gpus == 24


@pytest.mark.parametrize("size", ["", "16", "16x", "x8", "0x8", "16x8x2", "-1x8", "16×8", "1e3x8", " 16x8"])
def test_a_size_that_is_none_is_told_with_how_to_write_one(size: str, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(OWN)
    with pytest.raises(DescriptionError) as caught:
        cluster(f"{own}:ours@{size}")
    assert str(caught.value) == (f"{own}:ours@{size}: {size!r} is no size: write @NODESxGPUS, such as {own}:ours@16x8")


def test_a_file_that_is_not_there_is_told_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match=r"none\.yaml: No such file"):
        model(str(tmp_path / "none.yaml"))


def test_a_misspelled_key_is_told_before_the_one_that_is_missing_for_it(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("models: {mine: {layers: 4, hiden: 64, heads: 4, vocabulary: 100, sequence: 128}}")
    with pytest.raises(DescriptionError, match=r"own\.yaml: mine\.hiden: unknown key, did you mean hidden\?"):
        model(str(path))


def test_a_size_is_no_part_of_a_cluster_s_name_that_is_misspelled() -> None:
    with pytest.raises(DescriptionError, match="4x8-a100-80g: unknown among clusters, did you mean a100-80gb"):
        cluster("4x8-a100-80g")


@pytest.mark.parametrize("name", ["mi300x", "mi355x", "h800", "l40s", "rtx-4090", "a100-pcie-80gb"])
def test_a_device_without_a_published_iteration_has_no_interval(name: str) -> None:
    known = name in names("clusters")
    where = cluster(f"1x2-{name}") if known else node_of(device(name), 2)
    found = Estimator(model("llama3-8b"), where, framework("megatron"))(Run(8, data=2))
    assert str(found.uncertainty) == "error unknown"
    assert found.uncertainty.meaning == f"no published iteration on {name} is among the planner's sources"
    assert 0.05 < found.mfu < device(name).matmul


def test_a_mesh_has_only_the_links_between_the_ranks_of_a_collective() -> None:
    """By the all-reduces of 4 GiB that the description's source has measured: 48 GB/s of two ranks, 313 of eight."""
    for ranks, gbps in ((2, 47.671), (8, 312.912)):
        run = Run(8, tensor=ranks).of(framework("megatron"))
        seconds = Links(run, cluster("1x8-mi300x"), FITTED).collective(4e9, "tensor")
        assert 4 / seconds == pytest.approx(gbps, rel=0.08)
