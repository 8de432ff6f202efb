"""The tokenizer.json of a model's folder decides ids and texts, whatever the other files say."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from pipeline.model.tokenizer import read_tokenizer
from tests.paths import ROOT

MODEL = ROOT / "examples/addition/model"
TEXT = "12+3=15 7 +8<|im_end|>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for pattern in ("*.json", "*.jinja"):
        for path in MODEL.glob(pattern):
            shutil.copy(path, tmp_path)
    return tmp_path


def change(folder: Path, name: str, **values: object) -> None:
    """Set values in a JSON file, or remove those that are None."""
    content = json.loads((folder / name).read_text()) | values
    kept = {key: value for key, value in content.items() if value is not None}
    (folder / name).write_text(json.dumps(kept))


def added(text: str, special: bool = False) -> dict[str, object]:
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": text, "special": special} | flags


@pytest.mark.parametrize(
    "values",
    [
        {"tokenizer_class": "LlamaTokenizerFast", "backend": None},
        {"tokenizer_class": "Qwen2Tokenizer", "backend": None},
        {"tokenizer_class": "BertTokenizer", "backend": "sentencepiece"},
        {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", None]}},
        {"clean_up_tokenization_spaces": True},
        {"eos_token": added("<|im_end|>", True) | {"__type": "AddedToken"}},
    ],
)
def test_tokenizer_config_changes_no_id_and_no_text(folder, values):
    (folder / "vocab.json").write_text('{"a": 0, "b": 1}')
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "code.py").write_text("raise SystemExit")
    change(folder, "tokenizer_config.json", **values)
    found = read_tokenizer(folder)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    assert found(TEXT, add_special_tokens=False)["input_ids"] == ids
    assert found.backend_tokenizer.decode(ids, skip_special_tokens=False) == TEXT
    assert found.eos_token_id == 2


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"320": added("<think>")}},
            "token 320 as '<think>' with special=False, but tokenizer.json has no such added token",
        ),
        ("tokenizer_config.json", {"eos_token": "<eos>"}, "token 320 as '<eos>'"),
        ("tokenizer_config.json", {"eos_token": "="}, "token 31 as '=' with special=True"),
        ("added_tokens.json", {"<think>": 320}, "token 320 as '<think>'"),
        (
            "tokenizer.json",
            {"added_tokens": [{"id": 2} | added("<|im_end|>")]},
            "token 0 as '<|endoftext|>' with special=True",
        ),
    ],
)
def test_other_definitions_of_a_token_are_refused(folder, name, content, part):
    if not (folder / name).exists():
        (folder / name).write_text("{}")
    change(folder, name, **content)
    with pytest.raises(ValueError, match="make tokenizer") as caught:
        read_tokenizer(folder)
    assert part in str(caught.value)
    PreTrainedTokenizerFast.from_pretrained(folder).save_pretrained(folder)  # the suggested fix
    read_tokenizer(folder)


def test_a_model_without_end_token_is_refused(folder):
    change(folder, "tokenizer_config.json", eos_token=None)
    assert read_tokenizer(folder).eos_token_id is None  # vLLM reads generation_config.json
    change(folder, "generation_config.json", eos_token_id=None)
    with pytest.raises(ValueError, match="add eos_token"):
        read_tokenizer(folder)
