"""The model's folder: missing and unreadable files are reported."""

import json
import math
import shutil
from pathlib import Path

import pytest

from pipeline.errors import InputError
from pipeline.inputs.model_folder import find_model, weight_problems, with_weights
from tests.unit.inputs.small_inputs import error_with_file, the_error


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "has no config.json; give the folder of a Hugging Face model"),
        ("config.json", "{", "config.json cannot be read: "),
        ("config.json", "[]", "config.json is not a JSON object"),
        ("model.safetensors", None,
         "has no model.safetensors (and no model.safetensors.index.json)"),
        ("model.safetensors.index.json", '{"weight_map": {"w": "model-1.safetensors"}}',
         "has no model-1.safetensors (named by model.safetensors.index.json)"),
        ("model.safetensors.index.json", "{}", "has no weight_map"),
    ],
)  # fmt: skip
def test_an_incomplete_folder_is_refused(settings, model, name, content, message):
    assert message in error_with_file(settings, model, name, content)


def test_a_hub_that_cannot_be_reached_is_named(settings, monkeypatch):
    """The error names the cause. With the hub's offline switch, the test needs no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    problem = the_error(settings, "actor_rollout_ref.model.path=example/no-such-model")
    assert "example/no-such-model is not a local folder" in problem
    assert "no folder ./no" in the_error(settings, "actor_rollout_ref.model.path=./no/folder")


NAME = "model.safetensors"


@pytest.fixture
def weights(model: Path, tmp_path: Path) -> Path:
    """The weight file in a copy of the model."""
    shutil.copytree(model, tmp_path / "damaged")
    return tmp_path / "damaged" / NAME


def problems_of(weights: Path) -> tuple[str, ...]:
    with pytest.raises(InputError) as caught:
        find_model(str(weights.parent))
    return caught.value.problems


def with_header(header: object, size: int) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def tensor(begin: int, end: int) -> dict:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}


def test_complete_weights_are_counted(model: Path):
    """The count matches the one from the library that wrote the weights."""
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(model / NAME, framework="np") as source:
        shapes = [source.get_slice(name).get_shape() for name in source.keys()]  # noqa: SIM118
    assert find_model(str(model)).parameters == sum(math.prod(shape) for shape in shapes)


@pytest.mark.parametrize("change", [-1, -1000, 1])
def test_a_file_of_a_different_size_is_refused(weights: Path, change: int):
    """An interrupted download is found before a run wastes minutes on restarting workers."""
    whole = weights.read_bytes()
    weights.write_bytes(whole[:change] if change < 0 else whole + bytes(change))
    [problem] = problems_of(weights)
    assert f"{weights} is damaged: found {len(whole) + change} bytes" in problem


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ((10**6).to_bytes(8, "little") + b"{}", "found 10 bytes, expected at least 1000008"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (with_header([], 0), "its header does not describe tensors"),
        (with_header({"a": tensor(4, 8)}, 8), "expected them to begin at 0"),
    ],
)
def test_damaged_headers_are_refused(weights: Path, content: bytes, message: str):
    weights.write_bytes(content)
    [problem] = problems_of(weights)
    assert f"{weights} is damaged: " in problem
    assert message in problem


def test_every_damaged_file_and_every_missing_tensor_is_named(weights: Path):
    parts = [weights.with_name(f"model-{number}.safetensors") for number in range(3)]
    parts[0].write_bytes(with_header({"a": tensor(0, 8)}, 8))
    parts[1].write_bytes(with_header({"b": tensor(0, 8)}, 7))
    parts[2].write_bytes(with_header({"c": tensor(0, 8)}, 8))
    names = {"a": parts[0].name, "b": parts[1].name, "c": parts[2].name, "d": parts[2].name}
    index = weights.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": names}))
    damaged, lacking = problems_of(weights)
    assert f"{parts[1]} is damaged" in damaged
    expected = f"{parts[2]} lacks 1 tensors that the model's index lists for it; the first is d"
    assert expected in lacking


def rewrite(folder: Path, **fields: object) -> None:
    """Change fields of a model's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_fetched_weights_are_compared_with_the_config(model: Path, tmp_path: Path, monkeypatch):
    """Without an index, only the weights show that the config belongs to a different model."""
    monkeypatch.setattr("pipeline.inputs.model_folder._fetch", lambda place, patterns: fetched)
    fetched = shutil.copytree(model, tmp_path / "fetched")
    remote = find_model("s3://bucket/model")
    assert with_weights(remote).parameters == find_model(str(model)).parameters
    rewrite(fetched, hidden_size=128)
    with pytest.raises(InputError, match="has hidden_size=128, but the weights have 64 numbers"):
        with_weights(find_model("s3://bucket/model"))


def test_an_index_is_compared_with_the_config(model: Path, tmp_path: Path, monkeypatch):
    """The mismatch is found before hundreds of gigabytes are fetched."""
    fetched = shutil.copytree(model, tmp_path / "fetched")
    monkeypatch.setattr("pipeline.inputs.model_folder._fetch", lambda place, patterns: fetched)
    names = dict.fromkeys(find_model(str(model)).shapes, NAME)
    (fetched / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (fetched / NAME).unlink()
    assert weight_problems(find_model("s3://bucket/model")) == []
    rewrite(fetched, num_experts=32)
    [problem] = weight_problems(find_model("s3://bucket/model"))
    assert "has num_experts=32, but the weights have 16 experts in a layer; use the" in problem
