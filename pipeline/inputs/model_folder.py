"""The folder of a model (config, tokenizer and safetensors), which may be local or remote.

A remote model is in object storage or on the Hugging Face hub.
"""

import json
import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from pipeline.errors import InputError
from pipeline.inputs.fetch import fetch_files, remote_names
from pipeline.inputs.weight_files import check_weights
from pipeline.model.fields import Config, complete, value_problems
from pipeline.model.shapes import Shapes, shape_problems
from pipeline.store import is_remote
from pipeline.store.schemes import REMOTE_URI

_KEY = "actor_rollout_ref.model.path"
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
"""Config, tokenizer and chat template. Code (*.py) is never fetched, staged or run."""


@dataclass(frozen=True)
class ModelFolder:
    """The files of a model that a run stages.

    Example: ModelFolder(Path('examples/model'), None, ...).
    """

    folder: Path
    remote: str | None
    """Hub id or URI; None for a local model. The weights of a remote model are fetched only when
    the model is staged."""
    config: Config
    """Content of config.json, with the values that absent fields have in transformers."""
    small_files: tuple[str, ...]
    weight_files: tuple[str, ...]
    parameters: int | None = None
    """Number of parameters; None if the weights are remote and no index gives their size."""
    shapes: Shapes = field(default_factory=dict)
    """Shapes of all weights, keyed by name. For remote weights, the shapes are empty, and the names
    come from the index."""


def find_model(path: str) -> ModelFolder:
    """Return the model in a folder or, without its weights, the model at a URI or hub id.

    Raises InputError if the folder does not exist, the hub cannot be reached, or files are missing
    or unreadable.
    """
    folder, remote = _place(path)
    config = _read_config(folder)
    small = tuple(sorted({file.name for pattern in _SMALL_FILES for file in folder.glob(pattern)}))
    model = ModelFolder(folder, remote, config, small, _weights(folder))
    if remote is None:
        return _complete(model)
    return replace(model, parameters=_indexed(model), shapes=dict.fromkeys(_weight_map(folder), ()))


def weight_problems(model: ModelFolder) -> list[str]:
    """Return the contradictions between a model's config.json and its weights."""
    return [f"{_KEY}: config.json {text}" for text in shape_problems(model.config, model.shapes)]


def found_folder(path: str) -> Path | None:
    """Return the folder of a model that `find_model` refuses; None if it has no tokenizer.json."""
    folder = Path(path).expanduser()
    return folder if (folder / "tokenizer.json").is_file() else None


def found_config(path: str) -> Config | None:
    """Return the config.json of a model without looking at its weights; None if it is unusable."""
    try:
        return _read_config(_place(path)[0])
    except InputError:
        return None


def with_weights(model: ModelFolder) -> ModelFolder:
    """Return the same model with its weights on this machine.

    Raises InputError if weights cannot be fetched, are damaged or do not match config.json.
    """
    if model.remote is None:
        return model
    folder = _fetch(model.remote, [*_SMALL_FILES, *model.weight_files])
    complete = _complete(replace(model, folder=folder))
    if problems := weight_problems(complete):
        raise InputError(problems)
    return complete


def _place(path: str) -> tuple[Path, str | None]:
    """Return a model's folder and, for a remote model, its URI.

    Raises InputError if there is no such model.
    """
    folder = Path(path).expanduser()
    if folder.is_dir() and not is_remote(path):
        return folder, None
    if not is_remote(path) and (folder.exists() or not _HUB_ID.match(path)):
        raise InputError(
            [
                f"{_KEY}: no folder {path} (from {Path.cwd()}); give a folder with config.json, "
                f"safetensors and tokenizer, its {REMOTE_URI}, or a hub id such as "
                "Qwen/Qwen3-30B-A3B"
            ]
        )
    return _fetch(path, _SMALL_FILES), path


def _weights(folder: Path) -> tuple[str, ...]:
    """Return the names of the safetensors files, from the index if one exists."""
    return tuple(sorted(set(_weight_map(folder).values()))) or (_SINGLE,)


def _weight_map(folder: Path) -> dict[str, str]:
    """Return the file name that the index lists for each tensor; {} if there is no index."""
    if not (folder / _INDEX).is_file():
        return {}
    names = _read_json(folder, _INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise InputError([f"{_KEY}: {folder / _INDEX} has no weight_map; fetch it again"])
    return {str(tensor): str(name) for tensor, name in names.items()}


def _indexed(model: ModelFolder) -> int | None:
    """Return the number of parameters in a remote model, or None if no index gives its size."""
    if not (model.folder / _INDEX).is_file():
        return None
    total = (_read_json(model.folder, _INDEX).get("metadata") or {}).get("total_size")
    dtype = str(model.config.get("dtype", model.config.get("torch_dtype", "bfloat16")))
    return total // (4 if dtype == "float32" else 2) if isinstance(total, int) else None


def _complete(model: ModelFolder) -> ModelFolder:
    missing = [name for name in model.weight_files if not (model.folder / name).is_file()]
    if missing:
        why = f"named by {_INDEX}" if model.weight_files != (_SINGLE,) else f"and no {_INDEX}"
        raise InputError(
            [
                f"{_KEY}: {model.folder} has no {', '.join(missing)} ({why}); weights are read "
                "as safetensors: save the model with save_pretrained"
            ]
        )
    shapes = check_weights(_KEY, model.folder, model.weight_files, _weight_map(model.folder))
    return replace(model, parameters=sum(map(math.prod, shapes.values())), shapes=shapes)


def _read_config(folder: Path) -> Config:
    config = _read_json(folder, "config.json")
    if problems := value_problems(config):
        raise InputError([f"{_KEY}: config.json {text}" for text in problems])
    return complete(config)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((folder / name).read_bytes())
    except FileNotFoundError as error:
        raise InputError(
            [f"{_KEY}: {folder} has no {name}; give the folder of a Hugging Face model"]
        ) from error
    except (OSError, ValueError) as error:
        raise InputError([f"{_KEY}: {folder / name} cannot be read: {error}"]) from error
    if not isinstance(content, dict):
        raise InputError([f"{_KEY}: {folder / name} is not a JSON object; fetch it again"])
    return content


def _fetch(place: str, patterns: list[str]) -> Path:
    if is_remote(place):
        return fetch_files(_KEY, place, remote_names(_KEY, place, patterns))
    try:
        return Path(snapshot_download(place, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            [
                f"{_KEY}: {place} is not a local folder and could not be fetched from the Hugging "
                f"Face hub: {reason}; give a folder, or fix the access to the hub (HF_TOKEN, "
                "HF_HUB_OFFLINE)"
            ]
        ) from error
