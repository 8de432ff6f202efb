"""Importing a verl job: a shell script, or a YAML file of Hydra, becomes a settings file of ours.

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
from pipeline.config.imports.render import render
from pipeline.config.imports.script import read_script, unknown_part
from pipeline.config.imports.sort import sort_settings
from pipeline.config.keys import all_keys
from pipeline.config.reading.read import read_file, read_override
from pipeline.config.reading.spellings import least_rate
from pipeline.errors import InputError

_OWN_NAMES = ("ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer")
"""Hydra files of verl itself, whose defaults are those of VERL_DEFAULTS."""
_OPTIONS = {
    "--config-path": "path", "-cp": "path", "--config-dir": "path", "-cd": "path",
    "--config-name": "name", "-cn": "name",
}  # fmt: skip


def import_verl(source: Path, arguments: Sequence[str], variables: Mapping[str, str]) -> str:
    """The settings file of a verl script (.sh), or of a YAML file for verl.

    `arguments` are further ones of verl's command line; with `--config-name=NAME` among them the
    source is a folder, as after verl's `--config-path`. `variables` are the script's environment.
    Raises InputError: what cannot be read, with its line or key.
    """
    options, overrides = _options(arguments)
    if (problem := _source_problem(source, "name" in options)) is not None:
        raise InputError([f"{source}: {problem}"])
    notes: tuple[str, ...] = ()
    origin = source.name
    if source.suffix == ".sh":
        command = read_script(source, variables)
        notes = command.notes
        settings, defaults = _of_command(source, [*command.arguments, *arguments])
    else:
        path = source / f"{Path(options['name']).stem}.yaml" if "name" in options else source
        origin = path.name
        settings, defaults = _of_file(path, overrides), {}
    settings |= least_rate(settings)
    given = {**defaults, **settings}
    unknown = {key: text for key, value in given.items() if (text := _unknown(value))}
    result = sort_settings({k: v for k, v in given.items() if k not in unknown})
    result.refused.update({key: (given[key], text) for key, text in unknown.items()})
    for key in result.kept.keys() & defaults.keys() - settings.keys():
        what = result.notes.get(key) or f"here it would be {_our_default(key)}"
        result.notes[key] = f"verl's default; {what}"
    return render(result, origin, notes)


def _source_problem(source: Path, named: bool) -> str | None:
    """Why no job can be read from there; `named`: an option of verl names the file in a folder."""
    files = "expected verl's shell script (.sh) or YAML file (.yaml)"
    if not source.exists():
        return f"no such {'file or folder' if named else 'file'} (from {Path.cwd()}); {files}"
    if source.is_dir():
        return None if named else f"found a folder, {files}, or --config-name=NAME beside it"
    if source.suffix not in (".sh", ".yaml", ".yml"):
        return files
    if named and source.suffix != ".sh":
        return "found a file beside --config-name, expected its folder; leave the option out"
    return None


def _of_command(source: Path, arguments: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a command line of verl, and the defaults below them."""
    options, overrides = _options(arguments)
    name = Path(options.get("name", _OWN_NAMES[0])).stem
    if name not in _OWN_NAMES:
        return _of_file(Path(options.get("path", "."), f"{name}.yaml"), overrides), {}
    settings = _of_overrides(source, overrides)
    defaults = dict(VERL_DEFAULTS)
    if settings.get("trainer.total_training_steps") is not None:
        del defaults["trainer.total_epochs"]
    return settings, defaults


def _of_file(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    content = read_file(path)
    if "defaults" in content or any(is_interpolated(value) for _, value in leaves(content)):
        return dict(leaves(compose(path, overrides)))
    settings = {key: value for key, value in leaves(content) if value != "???"}
    return settings | _of_overrides(path, overrides)


def _of_overrides(source: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The settings by dotted key; the last of several for one key counts."""
    settings: dict[str, Any] = {}
    problems: list[str] = []
    for override in overrides:
        if override.startswith("~"):
            settings.pop(override[1:].partition("=")[0], None)
            continue
        key, _, text = override.partition("=")
        if unknown_part(text):  # it need not be YAML
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
    """Hydra's options that say which file is meant, and the overrides.

    Raises InputError for other options, which would be lost.
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
                    f"{argument}: no option that is read of verl's command line; write settings as "
                    "key.path=value, or leave it out"
                ]
            )
        else:
            overrides.append(argument)
    return options, overrides


def _unknown(value: Any) -> str | None:
    texts = value if isinstance(value, list) else [value]
    return next((found for t in texts if isinstance(t, str) and (found := unknown_part(t))), None)


def _our_default(key: str) -> Any:
    default = all_keys()[key].default
    return "null" if default is None else default
