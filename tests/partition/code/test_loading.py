"""Stage code beside its plan: whose parameters parts have, what is refused, and what an error in it says."""

from __future__ import annotations

import copy
import importlib.util
import json
import random
import re
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evenpipe.partition.dawnpiper.problem import PartitionError
from evenpipe.partition.models import Example, from_config
from evenpipe.partition.search.plan import Plan
from evenpipe.partition.trace import trace, weightless
from evenpipe.stage_code import Draws, StageCodeError, load_parts, write_stages
from tests.partition.code.cut import batches, drawn_cuts, plan_at, profiled, written

MODEL = """
import torch
from torch import nn

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.words = nn.Embedding(10, 8)
        self.spare = nn.Linear(2, 2)

    def forward(self, x, ids):
        hidden = self.first(x).tanh()
        hidden = hidden.relu()
        known = self.words(ids)
        return (hidden + known).sum()
"""


@pytest.fixture
def words(tmp_path):
    """A user's own file, its model in two stages, and the plan's path."""
    file = tmp_path / "words.py"
    file.write_text(MODEL)
    specification = importlib.util.spec_from_file_location("words", file)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    example = Example("words", module.Words(), {"x": torch.ones(3, 8), "ids": torch.ones(3, dtype=torch.long)})
    graph = trace(example.model, example.inputs)
    found = profiled(example, graph)
    cut = next(number for number, name in enumerate(graph.names) if name.endswith("relu"))
    path = tmp_path / "P.json"
    plan = plan_at(found, 2, [cut])
    parts = written(example, graph, plan, found, path)
    return example, graph, found, path, parts


@pytest.mark.parametrize("name", ["bert-large", "t5-large", pytest.param("amoebanet-d", marks=pytest.mark.long)])
def test_the_parts_state_together_is_the_models(small, tmp_path, name):
    example, graph = small(name)
    found = profiled(example, graph)
    plan = plan_at(found, 3, drawn_cuts(graph, 2, 1))
    parts = written(example, graph, plan, found, tmp_path / "P.json")

    merged = {key: value for part in parts for key, value in part.state_dict().items()}
    copy.deepcopy(example.model).load_state_dict(merged, strict=True)
    own = dict(example.model.named_parameters(remove_duplicate=False))
    for part in parts:
        assert all(tensor is own[key] for key, tensor in part.named_parameters(remove_duplicate=False))
        used = sum(tensor.numel() for tensor in part.parameters())
        assert used < sum(tensor.numel() for tensor in example.model.parameters())


def test_what_no_operation_reads_is_in_the_first_part(words):
    _, _, _, _, (first, second) = words
    assert "spare.weight" in first.state_dict()
    assert set(second.state_dict()) == {"words.weight"}


def test_stages_with_chunks_have_a_part_for_each(small, tmp_path):
    example, graph = small("bert-large")
    found = profiled(example, graph)
    plan = plan_at(found, 2, drawn_cuts(graph, 3, 2), "interleaved", chunks=2)
    parts = written(example, graph, plan, found, tmp_path / "P.json")

    assert len(load_parts(tmp_path / "P.json", 0, example.model)) == 2
    assert [part.LAST for part in parts] == [False, False, False, True]
    assert all(part.SENDS == after.RECEIVES for part, after in pairwise(parts))


def test_what_skips_a_stage_is_handed_on_as_it_is(small, tmp_path):
    example, graph = small("t5-large")
    found = profiled(example, graph)
    cuts = next(cuts for seed in range(99) if (cuts := drawn_cuts(graph, 2, seed)) and _skips(graph, cuts))
    first, second, _ = written(example, graph, plan_at(found, 3, cuts), found, tmp_path / "P.json")

    received = first(example.inputs, Draws(0, 0))
    sent = second(example.inputs, Draws(0, 0), *received)
    names = [boundary.name for boundary in second.SENDS]
    handed_on = [(names.index(to.name), at) for at, to in enumerate(second.RECEIVES) if to.name in names]
    assert handed_on
    assert all(sent[there] is received[here] for there, here in handed_on)


def _skips(graph, cuts):
    return set(graph.sent[cuts[0]]) & set(graph.sent[cuts[1]])


def test_an_error_names_the_users_own_line_and_keeps_its_type(words, tmp_path):
    example, _, _, _, (first, second) = words
    given = example.inputs | {"ids": torch.full((3,), 99)}

    with pytest.raises(IndexError, match=r"index out of range") as caught:
        second(given, Draws(0, 0), *first(given, Draws(0, 0)))
    assert str(caught.value).startswith(f"{tmp_path / 'words.py'}:15: `known = self.words(ids)`: ")
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, IndexError)


def test_other_inputs_than_the_plans_are_refused(words):
    example, _, _, _, (first, _) = words
    with pytest.raises(ValueError, match=r"input 'x' is \(5, 8\), and the plan was made for \(3, 8\)"):
        first({"x": torch.ones(5, 8)}, Draws(0, 0))
    with pytest.raises(ValueError, match="inputs have no 'x'"):
        first({"ids": example.inputs["ids"]}, Draws(0, 0))


def test_code_of_another_plan_or_model_is_refused_in_one_line(words):
    example, graph, found, path, _ = words
    code = path.with_name("P.stage1.py")

    class Other(type(example.model)):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(11, 8)

    assert re.fullmatch(
        rf"{code}: the model has 'words.weight' of \(11, 8\).*plan of this one", _refusal(path, Other())
    )
    assert f"{code}: the model has no 'words.weight'" in _refusal(path, nn.Linear(2, 2))
    code.write_text(code.read_text() + "\nraise KeyError('edited')\n")
    assert f"{code}: it is not as it was written with {path}, and is not executed: " in _refusal(path, example.model)
    with pytest.raises(StageCodeError, match="KeyError: 'edited'"):
        load_parts(path, 1, example.model, trust=True)
    write_stages(graph, found, plan_at(found, 2, [1]), path)
    digests = Plan.read(path).code
    plan_at(found, 2, [0]).write(path)
    assert f"{code}: it has no digest in {path}, and is not executed: " in _refusal(path, example.model)
    plan_at(found, 2, [0]).model_copy(update={"code": digests}).write(path)
    assert f"{code}: it is of another plan than {path} is now" in _refusal(path, example.model)
    code.unlink()
    assert f"{code}: No such file or directory: write it with evenpipe partition" in _refusal(path, example.model)
    with pytest.raises(StageCodeError, match="2 stages, and none of number 2"):
        load_parts(path, 2, example.model)


def test_a_model_of_other_modules_is_refused(words):
    """Its parameters are the plan's, and not what it computes with them."""
    example, _, _, path, _ = words

    class Known(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) / 2

    example.model.words = Known(10, 8)
    assert "the model's words is a Known, and the plan's was a Embedding: make a plan" in _refusal(path, example.model)


def test_a_configurations_attention_is_transformers_own_and_is_compared(tmp_path):
    """The code of a stage computes the kind that was traced, whatever the model that it is given has."""
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "vocab_size": 16,
            }
        )
    )
    example = from_config(file, 1, sequence_length=4)
    graph = trace(example.model, example.inputs)
    found = profiled(example, graph)
    assert found.origin.attention == "sdpa"
    assert any("scaled_dot_product_attention" in str(node.target) for node in graph.nodes)
    path = tmp_path / "P.json"
    written(example, graph, plan_at(found, 2, drawn_cuts(graph, 1, 0)), found, path)
    eager = from_config(file, 1, sequence_length=4, attention="eager")
    assert f"{path}: the model has eager attention, and the plan is of sdpa: make" in _refusal(path, eager.model)


def test_constants_of_another_plan_are_refused_in_one_line(tmp_path):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return (self.second(self.first(x)) * torch.tensor([0.5] * 24).view(3, 8)).sum()

    example = Example("masked", Masked(), {"x": torch.ones(3, 8)})
    graph = trace(example.model, example.inputs)
    found, path = profiled(example, graph), tmp_path / "P.json"
    constants = tmp_path / "P.constants.pt"
    written(example, graph, plan_at(found, 2, [1]), found, path)
    older = constants.read_bytes()
    written(example, graph, plan_at(found, 2, [0]), found, path)
    for content, said in ((older, "it is of another plan than"), (b"no such thing", "UnpicklingError: no constants")):
        constants.write_bytes(content)
        assert f"{constants}: it is not as it was written with {path}" in _refusal(path, example.model)
        with pytest.raises(StageCodeError, match=said):
            load_parts(path, 1, example.model, trust=True)
    constants.unlink()
    assert f"{constants}: No such file or directory" in _refusal(path, example.model)


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) * torch.tensor(0.5) + torch.tensor(1)


@pytest.mark.parametrize("around", [nullcontext, weightless], ids=["with weights", "weightless"])
def test_constants_that_a_submodule_makes_are_in_the_code(tmp_path, around):
    """As Falcon and DeBERTa-v2 make them: they are named by the submodule."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(Halved(8, 8), Halved(8, 8))

        def forward(self, x):
            return self.layers(x).square().sum()

    with around():
        traced = Example("halved", Model(), {"x": torch.ones(3, 8)})
        graph = trace(traced.model, traced.inputs)
        found = profiled(traced, graph)
    example = Example("halved", Model(), {"x": torch.ones(3, 8)})
    cut = next(number for number, name in enumerate(graph.names) if name.startswith("layers.1"))
    received = ()
    for part in written(example, graph, plan_at(found, 2, [cut - 1]), found, tmp_path / "P.json"):
        received = part(example.inputs, Draws(0, 0), *received)
    assert torch.equal(received[0], example.model(**example.inputs))


def test_parts_have_no_names_of_their_own_where_the_model_may_have_some(tmp_path):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.state, self.check = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("device_of", torch.ones(8))

        def forward(self, x):
            hidden = self.check(self.state(x) * self.device_of)
            return (hidden + torch.arange(8, device=x.device)).square().sum()

    example = Example("named", Named(), {"x": torch.ones(3, 8)})
    graph = trace(example.model, example.inputs)
    found = profiled(example, graph)
    parts = written(example, graph, plan_at(found, 2, [1]), found, tmp_path / "P.json")
    received = ()
    for part in parts:
        received = part(example.inputs, Draws(0, 0), *received)
    assert torch.equal(received[0], example.model(**example.inputs))


@pytest.mark.parametrize("name", ["P.stage1.py", "P.json"])
def test_no_flipped_byte_is_executed(words, name):
    """Changed white space in a plan, or a changed digest of another stage's file, does no harm."""
    example, _, _, path, _ = words
    file, places = path.with_name(name), random.Random(5)
    whole, plan = file.read_bytes(), Plan.read(path)
    refused = 0
    for _ in range(200):
        at = places.randrange(len(whole))
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << places.randrange(8)]) + whole[at + 1 :])
        said = _said(path, example.model)
        assert "\n" not in said
        assert said or Plan.read(path).model_copy(update={"code": plan.code}) == plan
        refused += bool(said)
    assert refused >= (200 if name == "P.stage1.py" else 150)
    file.write_bytes(whole)
    load_parts(path, 1, example.model)


def _said(path, model):
    try:
        load_parts(path, 1, model)
    except (StageCodeError, PartitionError) as error:
        return str(error)
    return ""


def _refusal(path, model):
    with pytest.raises(StageCodeError) as caught:
        load_parts(path, 1, model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_graph_of_another_model_is_refused(words, small):
    _, _, found, path, _ = words
    with pytest.raises(StageCodeError, match="the graph is not the one that the profile is of"):
        write_stages(small("bert-large")[1], found, plan_at(found, 2, [1]), path)


def test_parts_run_where_the_model_is(small, tmp_path):
    """Masks and positions too, whose device an exported graph fixes."""
    example, graph = small("t5-large")
    found = profiled(example, graph)
    there = copy.deepcopy(example.model).to("meta")
    moved = Example(example.name, there, {name: tensor.to("meta") for name, tensor in example.inputs.items()})
    received = ()
    for part in written(moved, graph, plan_at(found, 2, drawn_cuts(graph, 1, 0)), found, tmp_path / "P.json"):
        received = part(moved.inputs, Draws(0, 0), *received)
        assert {tensor.device.type for tensor in received} == {"meta"}


def test_no_value_outlives_its_last_use(small, tmp_path):
    """Held by a variable, memory that no backward needs would not be free until the part has ended."""
    example, graph = small("bert-large")
    found = profiled(example, graph)
    (part,) = written(example, graph, plan_at(found, 1, []), found, tmp_path / "P.json")
    storages = [it.nbytes for it in found.storages if it.producer >= 0]
    alive = _MostAlive()
    with torch.no_grad(), alive:
        part(batches(example, 1)[0], Draws(0, 0))
    assert alive.most < sum(storages) / 4


class _MostAlive(TorchDispatchMode):
    """The most bytes of storages made inside that were alive at once."""

    def __init__(self):
        super().__init__()
        self.most = 0
        self._made = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                self._made[StorageWeakRef(storage)] = storage.nbytes()
        self._made = {reference: size for reference, size in self._made.items() if not reference.expired()}
        self.most = max(self.most, sum(self._made.values()))
        return out


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
