"""Checks of users' files (reward file, estimators, losses), which are read but not run.

Without a reward file, the built-in scorers for the prompts' data sources score the samples. In
that case, the checks also find prompts with a data source that no scorer covers.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.keys import value_at
from pipeline.config.tree import CustomRewardFunction, RunConfig
from pipeline.errors import InputError, LastingError
from pipeline.inputs.fetch import local_file
from pipeline.rl.custom import CUSTOM, CustomKind, custom_function
from pipeline.rl.custom_source import check_source, uses_of
from pipeline.rl.data_sources import COMPUTE_SCORE, find_scorer
from pipeline.rl.rewards import is_passed, reward_kind
from pipeline.scoring.code import pack
from pipeline.scoring.folder import with_neighbours
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
    """Possible problems that cannot be confirmed without running the files."""


def check_custom_files(config: RunConfig) -> CustomFiles:
    """Read and check all users' files without running any. Raises InputError."""
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
            notes += _checked(key, path, contents[key], name, kind)
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
    beside = {name.partition("/")[0].removesuffix(".py") for name in files}
    kind = reward_kind(function.reward_kwargs)
    notes = _checked(key, path, content, function.name, kind, beside)
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
    return pack(files), notes


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


def _checked(
    key: str,
    path: Path,
    content: bytes,
    name: str,
    kind: CustomKind,
    beside: Collection[str] = (),
) -> list[str]:
    """Return notes on a file. Raises InputError if the file is invalid."""
    try:
        notes = check_source(content, str(path), name, kind, beside)
    except LastingError as error:
        raise InputError([f"{key}: {error}"]) from error
    return [f"{key}: {note}" for note in notes]


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
