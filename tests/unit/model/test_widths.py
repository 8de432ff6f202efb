"""Weight counts computed from config.json, compared with transformers' models on the meta
device."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.errors import InputError
from pipeline.model.widths import weight_count, widths_of
from tests.large_models import MODELS, hf_config
from tests.tiny_models import FAMILIES, tiny_config


def counted(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("model", MODELS)
def test_the_count_for_a_large_model_equals_that_of_transformers(model):
    config = hf_config(model)
    assert weight_count(widths_of(config)) == MODELS[model]
    fields = {name: value for name, value in config.items() if name != "num_nextn_predict_layers"}
    assert counted(AutoConfig.for_model(fields.pop("model_type"), **fields)) == MODELS[model]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_count_for_each_family_equals_that_of_transformers(family, tied):
    config = tiny_config(family, tie_word_embeddings=tied)
    assert weight_count(widths_of(config.to_dict())) == counted(config)


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size"])
@pytest.mark.parametrize("value", [None, 0, "64", True])
def test_the_error_for_a_missing_number_names_its_field(field, value):
    with pytest.raises(InputError, match=f"has {field}={value!r}, expected"):
        widths_of({**hf_config("qwen3-30b-a3b"), field: value})
