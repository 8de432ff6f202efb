"""The model's folder: what is missing or cannot be read is named."""

import pytest

from tests.unit.inputs.small_inputs import error_with_file, the_error


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "has no config.json; write the folder of a model in HF's"),
        ("config.json", "{", "config.json cannot be read: "),
        ("config.json", "[]", "config.json does not hold a JSON object"),
        ("model.safetensors", None, "has no model.safetensors (and no index of several)"),
        ("model.safetensors.index.json", '{"weight_map": {"w": "model-1.safetensors"}}',
         "has no model-1.safetensors (named by model.safetensors.index.json)"),
        ("model.safetensors.index.json", "{}", "has no weight_map"),
    ],
)  # fmt: skip
def test_incomplete_folder(settings, model, name, content, message):
    assert message in error_with_file(settings, model, name, content)


def test_no_folder(settings):
    assert the_error(settings, "actor_rollout_ref.model.path=./no/such/folder").startswith(
        "actor_rollout_ref.model.path: no folder ./no/such/folder (from "
    )


def test_hub_that_is_not_reached(settings, monkeypatch):
    """Said with its cause; the hub's own offline switch makes the test independent of a net."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    problem = the_error(settings, "actor_rollout_ref.model.path=nobody/no-such-model")
    assert problem.startswith(
        "actor_rollout_ref.model.path: nobody/no-such-model is not a folder here and could not "
        "be fetched from the Hugging Face hub: "
    )
