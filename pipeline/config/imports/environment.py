"""The environment variables that a verl job sets, and what they reach in Retrace."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.imports.script import TrainerCommand, written_value
from pipeline.config.imports.sort import SortedSettings

_SET = "if it is still needed, set it for `retrace run`; on Kubernetes, in {}"
_UNREAD = "environment variable; no process of Retrace reads it, or Retrace sets it itself"
_OWN = "environment variable that the script itself reads; rewards do not receive it"
_REWARD = (
    "the reward function of a verl job may read it; here, rewards receive only variables whose "
    "names begin with REWARD_: if the reward function reads it, rename it and set it for `retrace "
    "run`; on Kubernetes, in rollout.env"
)
_REACHES = {
    _UNREAD: (
        "RAY_ HYDRA_ SGLANG_ SGL_ VERL_ ASCEND_ HCCL_ OMP_ PYTHONUNBUFFERED TOKENIZERS_PARALLELISM"
    ),
    f"the rollout engine reads it; {_SET.format('rollout.env')}": "VLLM_ FLASHINFER_",
    f"the trainer reads it; {_SET.format('training.env')}": "NVTE_",
    f"engine and trainer read it; {_SET.format('rollout.env and training.env')}": (
        "CUDA_ CUBLAS CUDNN NCCL_ GLOO_ UCX_ NVSHMEM_ TORCH PYTORCH_ TRITON_ LD_ PYTHONPATH"
    ),
    f"the flow reads it; {_SET.format('flow.env')}": (
        "WANDB_ MLFLOW_ SWANLAB_ HF_ HUGGINGFACE_ AWS_ HTTP_ HTTPS_ NO_PROXY"
    ),
    f"rewards receive it; {_SET.format('rollout.env')}": "REWARD_",
}
"""The prefixes of the names that reach each kind of process."""
_BASHS = {"BASH_ENV", "PATH", "PWD", "OLDPWD", "SHLVL", "_"}
"""Variables that bash sets, and PATH, which belongs to the machine."""
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_ASSIGNMENT = re.compile(
    r"(?:--(?:env|export)=(?:ALL,)?)?(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.S
)
_RUNTIME = re.compile(r"--runtime-env(?P<json>-json)?(?:=(?P<value>.*))?", re.S)
_RUNTIME_KEY = re.compile(r".*\bruntime_env\.env_vars\.(?P<name>\w+)")


def add_environment(
    result: SortedSettings, variables: Mapping[str, str], reads: Collection[str]
) -> None:
    """Add environment variables to the sorted settings: as open points, or as without effect.

    Args:
        result: The sorted settings, changed in place.
        variables: The environment variables that the job sets.
        reads: The names of the variables that the script itself reads.
    """
    for name, value in variables.items():
        reason = _reach(name)
        if reason == _REWARD and name in reads:
            reason = _OWN
        shown = "***" if _SECRET.search(name) else written_value(value)
        if reason in (_UNREAD, _OWN):
            result.ignored.setdefault(reason, {})[name] = shown
        else:
            result.refused[name] = (shown, reason)


def _reach(name: str) -> str:
    """Return which processes of Retrace read an environment variable, with the fix."""
    for reason, prefixes in _REACHES.items():
        if name.upper().startswith(tuple(prefixes.split())):
            return reason
    return _REWARD


def script_environment(command: TrainerCommand, before: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a script sets for the trainer.

    Args:
        command: The command that starts the trainer.
        before: The environment of the script.
    """
    exported = {
        name: value
        for name, value in command.environment.items()
        if name not in _BASHS and before.get(name) != value
    }
    return exported | dict(_of_launcher(command.launcher, command.folder))


def take_out_environment(settings: dict[str, Any]) -> dict[str, str]:
    """Remove Ray's `runtime_env.env_vars.NAME` from settings, and return the variables."""
    found = {key: match["name"] for key in settings if (match := _RUNTIME_KEY.fullmatch(key))}
    return {name: str(settings.pop(key)) for key, name in found.items()}


def _of_launcher(words: Sequence[str], folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the variables in a launcher's words: `env A=1`, `-e A=1`, `--runtime-env=FILE`."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if runtime := _RUNTIME.fullmatch(word):
            value = following if runtime["value"] is None else runtime["value"]
            yield from _of_runtime(value, bool(runtime["json"]), folder)
        elif assignment := _ASSIGNMENT.fullmatch(word):
            yield assignment["name"], assignment["value"]


def _of_runtime(value: str, is_json: bool, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the variables of Ray's runtime environment, or a mark if it cannot be read."""
    try:
        content = json.loads(value) if is_json else yaml.safe_load((folder / value).read_text())
        found = {str(name): str(text) for name, text in content.get("env_vars", {}).items()}
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        yield "runtime_env", value
    else:
        yield from found.items()
