"""Checks of users' files (reward file, estimators, losses), which their own processes load.

These processes get no credentials, and decide like the workers (`pipeline.scoring.trial.try_load`).

Without a reward file, the built-in scorers for the prompts' data sources score the samples. In
that case, the checks also find prompts with a data source that no scorer covers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.keys import value_at
from pipeline.config.tree import CustomRewardFunction, RunConfig
from pipeline.errors import InputError, LastingError
from pipeline.inputs.fetch import local_file
from pipeline.rl.custom import CUSTOM, CustomKind, custom_function
from pipeline.rl.data_sources import COMPUTE_SCORE, find_scorer
from pipeline.rl.rewards import REWARD, is_passed
from pipeline.scoring.code import RewardCode, pack
from pipeline.scoring.folder import with_neighbours
from pipeline.scoring.source import uses_of
from pipeline.scoring.trial import try_load
from pipeline.store import is_remote


@dataclass(frozen=True)
class CustomFiles:
    """A run's user-supplied files, after the checks."""

    reward: bytes | None
    """The reward file with the files that it uses from its folder, packed as one content (see
    pipeline.scoring.code); None if no reward file is configured."""
    functions: Mapping[str, bytes]
    """The contents of the other files, keyed by the setting that names the function."""
    notes: tuple[str, ...]
    """Facts about the files that are not errors, such as a package that is missing here."""


def check_custom_files(config: RunConfig) -> CustomFiles:
    """Read all users' files, and load each in its own process. Raises InputError."""
    contents: dict[str, bytes] = {}
    notes: list[str] = []
    problems: list[str] = []
    wanted = {
        key: (function.path, function.name, kind)
        for key, kind in CUSTOM.items()
        if (function := custom_function(value_at(config, key))) is not None
    }
    for key, (place, name, kind) in wanted.items():
        try:
            path, contents[key] = _read(key, place)
            notes += _loaded(key, path, RewardCode(contents[key], name), kind, key)
        except InputError as error:
            problems += error.problems
    reward = None
    if config.custom_reward_function is not None:
        try:
            reward, found = _read_reward(config.custom_reward_function)
            notes += found
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return CustomFiles(reward, contents, tuple(notes))


def _read_reward(function: CustomRewardFunction) -> tuple[bytes, list[str]]:
    """Return a reward file with its neighbours, and notes on them. Raises InputError."""
    key, place = "custom_reward_function.path", function.path
    path, content = _read(key, place)
    folder = place.rpartition("/")[0] if is_remote(place) else path.absolute().parent.as_uri()
    files = with_neighbours(key, folder, path.name, content)
    packed = pack(files)
    code = RewardCode(packed, function.name, function.reward_kwargs)
    notes = _loaded(key, path, code, REWARD)
    _, *others = files
    if others:
        shown = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if others[5:] else "")
        notes.append(f"{key}: {path}: staged with the files that it uses from its folder: {shown}")
    read = {variable for each in files.values() for variable in uses_of(each).variables}
    if withheld := sorted(variable for variable in read if not is_passed(variable)):
        notes.append(
            f"{key}: {path}: it reads the environment variables {', '.join(withheld)}, which "
            "reward processes do not get: only variables whose names begin with REWARD_ are "
            f"passed, so set and read REWARD_{withheld[0]}"
        )
    return packed, notes


def _read(key: str, place: str) -> tuple[Path, bytes]:
    """Return the path of a file, or of its fetched copy, and its content. Raises InputError."""
    path: Path = local_file(key, place)
    if path.is_dir():
        raise InputError([f"{key}: {place} is a folder; give the path of the Python file in it"])
    if not path.exists():
        where = f"(from {Path.cwd()})"
        raise InputError([f"{key}: no file {place} {where}; give the path of a Python file"])
    try:
        return path, path.read_bytes()
    except OSError as error:
        raise InputError([f"{key}: the file cannot be read: {error}"]) from error


def _loaded(
    key: str, path: Path, code: RewardCode, kind: CustomKind, setting: str | None = None
) -> list[str]:
    """Load a file as its workers do, and return notes. Raises InputError if they would fail."""
    try:
        absent = try_load(code, setting)
    except LastingError as error:
        raise InputError([_about(key, path, str(error), kind)]) from error
    if absent is None:
        return []
    return [
        f"{_about(key, path, absent, kind)}; the {kind.runners} may have what is missing here, so "
        "the file is unchecked until they load it"
    ]


def _about(key: str, path: Path, text: str, kind: CustomKind) -> str:
    return f"{key}: {path}: {text.removeprefix(f'{kind.file}: ')}"


def unscored_problems(
    config: RunConfig, key: str, unscored: Sequence[tuple[str, str, int]]
) -> list[str]:
    """Return one problem for each prompt file that has data sources without a scorer.

    Args:
        config: Settings of the run. With a reward file or a replay_file, no scorer is needed, so
            the result is empty.
        key: The setting that names the prompt files.
        unscored: File, data source and number of the prompts for which there was no scorer.
    """
    replay = config.actor_rollout_ref.actor.router_replay
    if config.custom_reward_function is not None or replay.replay_file is not None:
        return []
    found: dict[str, list[str]] = {}
    for file, source, count in unscored:
        if find_scorer(source) is None:
            found.setdefault(file, []).append(f"{source!r} ({count})")
    return [
        f"{key}: {file} has prompts with data_source {', '.join(sources[:5])}"
        f"{' and other values' if len(sources) > 5 else ''}, for which there is no built-in "
        f"scorer; write {COMPUTE_SCORE} into a Python file and set custom_reward_function.path "
        "(docs/rewards.md lists the data sources with a built-in scorer)"
        for file, sources in found.items()
    ]
