"""Import of a verl job: a shell script or a Hydra YAML file becomes our settings file.

script ─► bash ─► key=value ─┐
                             ├─► verl's defaults below them ─► sorted ─► YAML with TODO comments
YAML ─► Hydra, OmegaConf ────┘
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.dotted import is_interpolated, leaves, put
from pipeline.config.imports.compose import compose, resolve
from pipeline.config.imports.defaults import VERL_DEFAULTS
from pipeline.config.imports.environment import (
    add_environment,
    script_environment,
    take_out_environment,
)
from pipeline.config.imports.render import render
from pipeline.config.imports.script import TrainerCommand, read_script, unknown_part, written_value
from pipeline.config.imports.sort import sort_settings
from pipeline.config.keys import all_keys
from pipeline.config.reading.read import read_file, read_override
from pipeline.config.reading.spellings import least_rate, our_spelling
from pipeline.errors import InputError
from pipeline.store import is_remote

_OWN_NAMES = ("ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer")
"""The names of verl's own Hydra files. For scripts that use them, VERL_DEFAULTS applies."""
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
_TRAIN_FILES = "data.train_files"
_OPTIONS = {
    "--config-path": "path", "-cp": "path", "--config-dir": "path", "-cd": "path",
    "--config-name": "name", "-cn": "name",
}  # fmt: skip


def import_verl(source: Path, arguments: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return our settings file for a verl script (.sh) or a verl YAML file.

    Args:
        source: The script or YAML file. If the arguments contain `--config-name=NAME`, it is a
            folder, as in verl's `--config-path`.
        arguments: Additional arguments from verl's command line.
        variables: The environment of the script.

    Raises:
        InputError: The source, or a line or key in it, cannot be read. The error names that
            source, line or key.
    """
    options, overrides = _options(arguments)
    if (problem := _source_problem(source, "name" in options)) is not None:
        raise InputError([f"{source}: {problem}"])
    notes: tuple[str, ...] = ()
    exported: dict[str, str] = {}
    reads: frozenset[str] = frozenset()
    origin = source.name
    if source.suffix in _SCRIPTS:
        command = read_script(source, variables)
        notes, reads, exported = (
            command.notes,
            command.reads,
            script_environment(command, variables),
        )
        settings, defaults = _of_command(source, command, arguments)
    else:
        path = source / f"{Path(options['name']).stem}.yaml" if "name" in options else source
        origin = path.name
        settings, defaults = _of_file(path, overrides), {}
    exported |= take_out_environment(settings)
    settings |= least_rate(settings)
    given = {**defaults, **settings}
    unknown = {key: text for key, value in given.items() if (text := _unknown(value))}
    result = sort_settings({k: v for k, v in given.items() if k not in unknown})
    result.refused.update({key: (_written(given[key]), text) for key, text in unknown.items()})
    for key in unknown:
        result.missing.pop(our_spelling(key), None)
    add_environment(result, exported, reads)
    if _TRAIN_FILES not in result.refused and not result.kept.get(_TRAIN_FILES):
        found = result.kept.pop(_TRAIN_FILES, ...)
        result.refused[_TRAIN_FILES] = (
            found,
            "verl's default is an example file; name the prompts",
        )
    for key in result.kept.keys() & defaults.keys() - settings.keys():
        what = result.notes.get(key) or f"the default here is {_our_default(key)}"
        result.notes[key] = f"verl's default; {what}"
    return render(result, origin, notes)


def _source_problem(source: Path, named: bool) -> str | None:
    """Return the reason why no job can be read from a path, or None.

    `named` is true if the arguments name a file in the folder (`--config-name`).
    """
    files = "expected verl's shell script (.sh) or YAML file (.yaml)"
    if not source.exists():
        return f"no such {'file or folder' if named else 'file'} (from {Path.cwd()}); {files}"
    if source.is_dir():
        return None if named else f"found a folder, {files}; for a folder, add --config-name=NAME"
    if source.suffix not in (*_SCRIPTS, ".yaml", ".yml"):
        return files
    if named and source.suffix not in _SCRIPTS:
        return "found a file and --config-name, expected a folder; leave the option out"
    return None


def _of_command(
    source: Path, command: TrainerCommand, more: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings on a verl command line, and the defaults of the other settings.

    `more` contains the arguments of `import-verl`, which follow those of the command.
    """
    options, overrides = _options([*command.arguments, *more])
    name = Path(options.get("name", _OWN_NAMES[0])).stem
    if name not in _OWN_NAMES:
        folder = command.folder / options.get("path", ".")
        return _placed(_of_file(folder / f"{name}.yaml", overrides), command.folder), {}
    settings = _placed(_of_overrides(source, overrides), command.folder)
    defaults = dict(VERL_DEFAULTS)
    if settings.get("trainer.total_training_steps") is not None:
        del defaults["trainer.total_epochs"]
    return settings, defaults


def _placed(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings with paths that are relative to `folder` as absolute paths.

    If the trainer's working folder is that of this process, paths stay unchanged.
    """
    if folder == Path.cwd():
        return settings
    return {key: _place(key, value, folder) for key, value in settings.items()}


def _place(key: str, value: Any, folder: Path) -> Any:
    setting = all_keys().get(our_spelling(key))
    if setting is None or not setting.is_place:
        return value
    if isinstance(value, list):
        return [_place(key, item, folder) for item in value]
    is_path = isinstance(value, str) and value and not unknown_part(value)
    if not is_path or value[0] in "~$" or is_remote(value):
        return value
    path = folder / value
    is_hub_id = key.endswith("model.path") and not path.exists()
    return value if is_hub_id else str(path)


def _of_file(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    content = read_file(path)
    if "defaults" in content or any(is_interpolated(value) for _, value in leaves(content)):
        return dict(leaves(compose(path, overrides)))
    settings = {key: value for key, value in leaves(content) if value != "???"}
    return settings | _of_overrides(path, overrides)


def _of_overrides(source: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings by dotted key; for each key, the last override applies."""
    settings: dict[str, Any] = {}
    problems: list[str] = []
    for override in overrides:
        if override.startswith("~"):
            settings.pop(override[1:].partition("=")[0], None)
            continue
        key, _, text = override.partition("=")
        if unknown_part(text):  # the text may not be YAML
            settings[key.lstrip("+")] = text
            continue
        try:
            parts, value = read_override(override)
        except InputError as error:
            problems += [f"{source}: {problem}" for problem in error.problems]
        else:
            settings.update(leaves({".".join(parts): value}))
    if problems:
        raise InputError(problems)
    if any(is_interpolated(value) for value in settings.values()):
        groups: dict[str, Any] = {}
        for key, value in settings.items():
            put(groups, key.split("."), value)
        settings = dict(leaves(resolve(groups, str(source))))
    return settings


def _options(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the Hydra options that select the file, and the overrides.

    Raises InputError for any other option, because its effect would be lost.
    """
    options: dict[str, str] = {}
    overrides: list[str] = []
    left = iter(arguments)
    for argument in left:
        option, _, value = argument.partition("=")
        if option in _OPTIONS:
            options[_OPTIONS[option]] = value or next(left, "")
        elif argument.startswith("-"):
            raise InputError(
                [
                    f"{argument}: this option of verl's command line is not supported; give "
                    "settings as key.path=value, or leave the option out"
                ]
            )
        else:
            overrides.append(argument)
    return options, overrides


def _unknown(value: Any) -> str | None:
    texts = value if isinstance(value, list) else [value]
    return next((found for t in texts if isinstance(t, str) and (found := unknown_part(t))), None)


def _written(value: Any) -> Any:
    if isinstance(value, list):
        return [_written(item) for item in value]
    return written_value(value) if isinstance(value, str) else value


def _our_default(key: str) -> Any:
    default = all_keys()[key].default
    return "null" if default is None else default
