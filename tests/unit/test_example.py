"""The committed example, compared with its README and quickstart.yaml."""

import importlib.util
import json
import sys

import pyarrow.parquet as pq
import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from pipeline.config.reading.load import load_config
from pipeline.config.rules.check import config_problems
from pipeline.model.families import moe_geometry
from tests.paths import ROOT

ADDITION = ROOT / "examples" / "addition"
MODEL = ADDITION / "model"


def load_script(name):
    """Load a script from the example's folder; it can import the folder's other scripts."""
    spec = importlib.util.spec_from_file_location(f"addition_{name}", ADDITION / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def hf_config():
    return json.loads((MODEL / "config.json").read_text())


@pytest.fixture(scope="module")
def problems():
    return load_script("problems")


@pytest.fixture(scope="module")
def compute_score():
    return load_script("reward").compute_score


def rows(part):
    return pq.read_table(ADDITION / f"{part}.parquet").to_pylist()


def test_model_is_a_small_moe_with_sizes_that_layouts_divide(hf_config):
    geometry = moe_geometry(hf_config)
    assert hf_config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert len(geometry.layers) >= 4
    assert geometry.experts >= 16
    assert geometry.topk >= 4
    for size in ("vocab_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"):
        assert hf_config[size] % 2 == 0, size
    assert hf_config["vocab_size"] % 8 == 0
    assert hf_config["hidden_size"] % 32 == 0
    assert hf_config["moe_intermediate_size"] % 64 == 0, (
        "each rank of TP2 needs a multiple of 32 columns"
    )


def test_weights_are_small_in_bf16_and_have_qwen3s_names(hf_config):
    files = list(MODEL.glob("*.safetensors"))
    assert [file.name for file in files] == ["model.safetensors"]
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 6_000_000
    with safe_open(files[0], "np") as weights:
        names = set(weights.keys())
        types = {weights.get_slice(name).get_dtype() for name in names}
    experts = {
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
        for layer in range(hf_config["num_hidden_layers"])
        for expert in range(hf_config["num_experts"])
        for projection in ("gate", "up", "down")
    }
    assert types == {"BF16"}
    assert experts <= names
    assert {name for name in names if ".experts." in name} == experts


def test_the_tokenizer_and_the_configs_agree(tokenizer, hf_config):
    generation = json.loads((MODEL / "generation_config.json").read_text())
    assert len(tokenizer) == hf_config["vocab_size"]
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == hf_config["eos_token_id"] == generation["eos_token_id"]
    assert tokenizer.pad_token_id == hf_config["pad_token_id"] == generation["pad_token_id"]
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") < hf_config["vocab_size"]


@pytest.mark.parametrize("text", ["7+8=15 3+5+1=9 95", "Grüße, 世界!\n\t  🙂", "  two  spaces\r\n"])
def test_tokenizer_round_trip_keeps_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_each_digit_is_one_token(tokenizer):
    assert tokenizer.tokenize("1234567890") == list("1234567890")


def test_the_chat_template_is_that_of_qwen(tokenizer):
    messages = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "37+58=?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nAdd.<|im_end|>\n"
        "<|im_start|>user\n37+58=?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_data_has_the_columns_of_verl():
    for part, size in (("train", 3072), ("val", 128)):
        table = rows(part)
        assert len(table) == size
        for index, row in enumerate(table):
            (message,) = row["prompt"]
            a, b = map(int, message["content"].removesuffix("=?").split("+"))
            assert row == {
                "data_source": "retrace/addition",
                "prompt": [{"role": "user", "content": f"{a}+{b}=?"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"split": part, "index": index},
            }


def test_no_question_is_in_two_parts(problems):
    """The files contain the parts of the split, which have no question in common."""
    parts = problems.split()
    everything = [problem for part in parts.values() for problem in part]
    assert len(everything) == len(set(everything))
    for part in ("train", "val"):
        questions = [row["prompt"][0]["content"] for row in rows(part)]
        assert questions == [problem.question for problem in parts[part]]


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("7+8=15 3+5+1=9 95", 1.0),
        ("95", 1.0),
        ("wrong steps, right sum: 95\n", 1.0),
        ("7+8=15 3+5+1=9 95<|im_end|>", 1.0),
        ("7+8=15 3+5+0=8 85", 0.0),
        ("95 or so", 0.0),
        ("195", 0.0),
        ("095", 0.0),
        ("7+8=15 3+5+1=9", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_is_for_the_exact_sum_at_the_end(compute_score, response, score):
    assert compute_score("retrace/addition", response, "95", {"index": 0}) == score


def test_worked_answers_are_right_and_slips_make_them_wrong(problems, compute_score):
    """An answer without slips scores 1.0; one slip in the ones, carry or tens reduces the score to
    0.0."""
    slips = [problems.Slips(ones=1), problems.Slips(carry=1), problems.Slips(tens=-1)]
    for problem in problems.split()["val"]:
        right = problems.worked_answer(problem)
        assert compute_score("", right, problem.answer) == 1.0
        for slip in slips:
            wrong = problems.worked_answer(problem, slip)
            assert compute_score("", wrong, problem.answer) == 0.0


def test_prompts_and_responses_fit_the_limits_of_the_quickstart(problems, tokenizer):
    data = load_config(ROOT / "examples" / "quickstart.yaml").config.data
    for problem in problems.split()["val"]:
        messages = [{"role": "user", "content": problem.question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        response = tokenizer(problems.worked_answer(problem) + "<|im_end|>")["input_ids"]
        assert len(prompt) <= data.max_prompt_length
        assert 17 <= len(response) <= data.max_response_length


def test_the_quickstart_is_valid_and_its_files_exist(hf_config):
    config = load_config(ROOT / "examples" / "quickstart.yaml").config
    assert config_problems(config, hf_config) == []
    assert config.actor_rollout_ref.actor.router_replay.mode == "R3"
    assert config.actor_rollout_ref.actor.router_replay.native_every == 1
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay
    assert config.trainer.total_training_steps >= 5
    paths = [
        config.data.train_files,
        config.data.val_files,
        config.custom_reward_function.path,
        f"{config.actor_rollout_ref.model.path}/config.json",
    ]
    assert [path for path in paths if not (ROOT / path).is_file()] == []
