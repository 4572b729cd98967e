"""A PyTorchJob is one to the models of kubeflow-training: they know every field, and miss none."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import yaml
from kubeflow.training.api_client import ApiClient
from kubernetes.client import ApiClient as KubernetesClient

from evenpipe.cli.plan import engine_of
from evenpipe.descriptions import framework as described
from evenpipe.recipes import RecipeError
from evenpipe.recipes.files import files_of
from evenpipe.recipes.unsupported import refuse
from tests.recipes.tiny import FOUR_GPUS, TWO_NODES, bert, gpt, recipe_of


@pytest.mark.parametrize("framework", ["megatron", "deepspeed"])
@pytest.mark.parametrize("nodes", [FOUR_GPUS, TWO_NODES])
@pytest.mark.parametrize("kind", [gpt, bert])
def test_models_read_the_whole_job(framework, nodes, kind):
    recipe = recipe_of(framework, "kubernetes", {"namespace": "team"}, nodes, kind())
    configuration, job = yaml.safe_load_all(files_of(recipe)["job.yaml"])
    for client, kind_name, document in (
        (KubernetesClient(), "V1ConfigMap", configuration),
        (ApiClient(), "KubeflowOrgV1PyTorchJob", job),
    ):
        read = client.deserialize(SimpleNamespace(data=json.dumps(document)), kind_name)
        assert client.sanitize_for_serialization(read) == document, "a field that the models do not know"
    roles = job["spec"]["pytorchReplicaSpecs"]
    assert sum(role["replicas"] for role in roles.values()) == recipe.cluster.nodes
    names = {"train.sh"} | (
        {"train.py", "model.py", "data.py", "ds_config.json"} if framework == "deepspeed" else set()
    )
    assert set(configuration["data"]) == names


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "Upper"),
        ("name", "-x"),
        ("namespace", "a b"),
        ("claim", "x" * 64),
        ("mount", "here"),
        ("mount", "/a:b"),
    ],
)
def test_names_that_kubernetes_does_not_take_are_refused(key, value):
    recipe = recipe_of("megatron", "kubernetes", {key: value}, TWO_NODES)
    with pytest.raises(RecipeError, match=rf"--set {key}="):
        refuse(recipe, engine_of(described("megatron")))


def test_a_model_of_any_name_has_a_job_s_name():
    refuse(recipe_of("megatron", "kubernetes", of=gpt("Ünï $(x)\n")), engine_of(described("megatron")))
