"""verl's YAML files: Hydra composes `defaults` and overrides, and OmegaConf resolves `${...}`.

Hydra and OmegaConf belong to the extra `verl` and are imported only where they are used.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import InputError
from pipeline.extras import need


def compose(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the resolved content of a Hydra file, with overrides from the command line.

    Values that the file leaves open (`???`) are omitted. Raises InputError if the extra is not
    installed, if Hydra refuses the file or an override, or if a value cannot be resolved.
    """
    need("verl", f"`retrace import-verl` of {path} with `defaults` or `${{...}}`")
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if not path.is_file():
        raise InputError([f"{path}: the settings file does not exist; give the path to a file"])
    try:
        with initialize_config_dir(config_dir=str(path.parent.resolve()), version_base=None):
            composed = hydra_compose(path.stem, overrides=list(overrides))
            return _resolved(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError([f"{path}: {_said(error)}"]) from error


def resolve(settings: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return the settings with every `${...}` resolved. Raises InputError as `compose` does."""
    need("verl", f"`retrace import-verl` of {origin} with `${{...}}`")
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return _resolved(OmegaConf.create(settings))
    except OmegaConfBaseException as error:
        raise InputError([f"{origin}: {_said(error)}"]) from error


def _resolved(composed: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    content = OmegaConf.to_container(composed, resolve=True)
    if not isinstance(content, dict):
        raise InputError([f"found a {type(content).__name__} at the top level, expected a group"])
    return {str(key): value for key, value in _without_open(content).items()}


def _without_open(group: dict[Any, Any]) -> dict[Any, Any]:
    return {
        key: _without_open(value) if isinstance(value, dict) else value
        for key, value in group.items()
        if value != "???"
    }


def _said(error: Exception) -> str:
    """Return the library's message on one line, with the cause that a Hydra error often wraps."""
    texts = [str(error), *([str(error.__cause__)] if error.__cause__ is not None else [])]
    said = "; ".join(" ".join(text.split()) for text in texts if text)
    if "Could not load" not in said:
        return said
    return (
        f"{said}; if this file belongs to verl, install verl or add verl's folder to the settings "
        "file: hydra: {searchpath: [file:///.../verl/trainer/config]}"
    )
