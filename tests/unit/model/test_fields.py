"""The types and defaults of config.json's fields, compared with transformers' own classes."""

import dataclasses

import pytest
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pipeline.model.families import FAMILIES as FAMILY_NAMES
from pipeline.model.fields import (
    DEFAULTS,
    FIELDS,
    complete,
    missing_fields,
    pair_problems,
    value_problems,
)
from tests.large_models import MODELS, hf_config
from tests.tiny_models import FAMILIES, tiny_config

SAMPLES = [None, True, 2, 0.5, "2", [2], ["full_attention"]]


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_value_that_transformers_refuses_is_refused(family):
    """The sizes are those of a tiny model, so only the types of the values matter."""
    shape = tiny_config(family).to_dict()
    names = {field.name for field in dataclasses.fields(CONFIG_MAPPING[family])} & FIELDS.keys()
    for name in sorted(names):
        for value in SAMPLES:
            config = {**shape, name: value}
            if not value_problems(config) and not any(pair_problems(complete(config))):
                fields = {key: item for key, item in config.items() if key != "model_type"}
                AutoConfig.for_model(family, **fields)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_an_absent_field_has_the_default_of_transformers(family):
    known = {field.name: field for field in dataclasses.fields(CONFIG_MAPPING[family])}
    for name, value in DEFAULTS[family].items():
        assert known[name].default == value


@pytest.mark.parametrize("model", MODELS)
def test_published_configs_have_no_problems_and_lack_nothing(model):
    config = hf_config(model)
    assert value_problems(config) == []
    assert missing_fields(config) == {}


@pytest.mark.parametrize(
    ("family", "change", "expected"),
    [
        ("mixtral", {"head_dim": None}, {"head_dim": 16}),
        ("glm4_moe", {}, {}),
        ("qwen2", {}, {"head_dim": 32}),
        ("deepseek_v3", {"topk_method": None}, {"topk_method": "noaux_tc"}),
    ],
)
def test_fields_that_only_the_code_of_transformers_has_are_added(family, change, expected):
    config = {**FAMILIES[family], **change}
    name = AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[family]].__name__
    assert missing_fields(config) == {**expected, "architectures": [name]}
    assert missing_fields({**config, "architectures": [name]}) == expected


def test_a_null_number_of_key_value_heads_means_one_for_each_head():
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": None}
    assert complete(config)["num_key_value_heads"] == 4
    unknown = {"model_type": "another", "num_key_value_heads": None}
    assert complete(unknown) == unknown
    assert value_problems(unknown) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size=null"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"mlp_only_layers": [0.5]}, "mlp_only_layers=[0.5]"),
        ({"eos_token_id": [2, "3"]}, "eos_token_id=[2, '3']"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_theta=null"),
        ({"rope_theta": -1}, "rope_theta=-1"),
    ],
)
def test_an_impossible_value_is_named(change, named):
    [problem] = value_problems({**FAMILIES["qwen3_moe"], **change})
    assert problem.startswith(f"has {named}")


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("llama", {"num_attention_heads": 5, "num_key_value_heads": 5}, "num_attention_heads=5"),
        ("qwen3_moe", {"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ("qwen3_moe", {"num_experts_per_tok": 17}, "num_experts_per_tok=17"),
        ("qwen3_moe", {"layer_types": ["sliding_attention"] * 4}, "layer_types=['sliding"),
        ("qwen3_moe", {"layer_types": ["full_attention"] * 3}, "layer_types=['full"),
        ("qwen3_moe", {"architectures": ["Qwen3MoeModel"]}, "architectures=['Qwen3MoeModel']"),
        ("deepseek_v3", {"topk_group": None}, "topk_group=null"),
        ("deepseek_v3", {"topk_group": 5, "num_experts_per_tok": 10}, "topk_group=5"),
        ("deepseek_v3", {"n_group": 3}, "n_group=3"),
    ],
)
def test_values_that_contradict_each_other_are_named(family, change, named):
    [problem] = pair_problems(complete({**FAMILIES[family], **change}))
    assert problem.startswith(f"has {named}")
