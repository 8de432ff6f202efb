"""Checking what scores a run's samples: the reward file, which is read and not run, or the built-in
scorers of the prompts' data sources.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.tree import CustomRewardFunction, RunConfig
from pipeline.errors import InputError
from pipeline.inputs.fetch import local_file
from pipeline.inputs.prompts import Row
from pipeline.rl.data_sources import COMPUTE_SCORE, find_scorer
from pipeline.rl.reward_source import check_source
from pipeline.rl.rewards import RewardError


@dataclass(frozen=True)
class RewardFile:
    """A checked reward file."""

    content: bytes
    notes: tuple[str, ...]
    """What only running it would show."""


def check_reward(function: CustomRewardFunction | None) -> RewardFile | None:
    """Read and check the reward file, without running it. Raises InputError."""
    if function is None:
        return None
    key = "custom_reward_function.path"
    path: Path = local_file(key, function.path)
    if path.is_dir():
        raise InputError(
            [f"{key}: {function.path} is a folder; write the path of the Python file in it"]
        )
    if not path.exists():
        where = f"(from {Path.cwd()})"
        raise InputError(
            [f"{key}: no file {function.path} {where}; write the path of a Python file"]
        )
    try:
        content = path.read_bytes()
        notes = check_source(content, str(path), function.name)
    except OSError as error:
        raise InputError([f"{key}: the file cannot be read: {error}"]) from error
    except RewardError as error:
        raise InputError([f"{key}: {error}"]) from error
    return RewardFile(content, tuple(f"{key}: {note}" for note in notes))


def unscored_problems(config: RunConfig, key: str, rows: Sequence[Row]) -> list[str]:
    """The files whose data sources nothing scores: there is neither a reward file nor a scorer."""
    replay = config.actor_rollout_ref.actor.router_replay
    if config.custom_reward_function is not None or replay.replay_file is not None:
        return []
    unscored = Counter(
        (row.file, row.data_source) for row in rows if find_scorer(row.data_source) is None
    )
    files = dict.fromkeys(file for file, _ in unscored)
    return [
        f"{key}: {file} has prompts with {_sources(unscored, file)}, which no built-in scorer "
        f"scores; write {COMPUTE_SCORE} into a Python file and set custom_reward_function.path "
        "(docs/rewards.md has the data sources that need none)"
        for file in files
    ]


def _sources(unscored: Counter[tuple[str, str]], file: str) -> str:
    found = [
        f"{source!r} ({count})" for (other, source), count in unscored.items() if other == file
    ]
    more = f" and {len(found) - 5} other values" if len(found) > 5 else ""
    return f"data_source {', '.join(found[:5])}{more}"
