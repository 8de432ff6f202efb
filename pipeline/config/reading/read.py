"""Readers of settings from a YAML file, overrides (verl's `key.path=value`) or Python values."""

import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.keys import all_keys
from pipeline.config.reading.spellings import our_spelling
from pipeline.errors import InputError
from pipeline.store import place_text

_OVERRIDE = re.compile(r"^\+{0,2}(?P<key>[A-Za-z_][\w.-]*)=(?P<value>.*)$", re.DOTALL)


class _Loader(yaml.SafeLoader):
    """Read YAML as OmegaConf does (1e-6 is a number, dates stay text); refuse duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            line = key_node.start_mark.line + 1
            if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(
                    problem=f"key {key_node.value!r} appears twice, on line "
                    f"{seen[key_node.value]} and on line {line}; remove one",
                    problem_mark=key_node.start_mark,
                )
            seen[key_node.value] = line
        return super().construct_mapping(node, deep)


# YAML 1.1 ignores underscores, so it would read 0.5_2, the bounds 0.5 and 2, as 0.52. Here, numbers
# may contain underscores only as thousands separators; any other value with an underscore is text.
_THOUSANDS = r"(?!.*_(?!\d{3}(?:\D|$)))(?!.*\.\d*_)"
# YAML 1.1 would read 010 as 8, and 12:30 as 750. YAML 1.2 and Hydra do not, so both are text here.
_NUMBER = rf"(?![-+]?0[0-7_]+$)(?!.*:){_THOUSANDS}"
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, re.compile(f"{_NUMBER}(?:{regexp.pattern})", regexp.flags))
        if tag.endswith((":int", ":float"))
        else (tag, regexp)
        for tag, regexp in resolvers
        if not tag.endswith(":timestamp")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# PyYAML implements YAML 1.1, where a float in exponent notation requires a dot and a signed
# exponent. Without this resolver, 1e-6 and 1.0e6 would be text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(_THOUSANDS + r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


_CONVERTED = tuple(f"tag:yaml.org,2002:{name}" for name in ("int", "float", "bool"))


def _load(text: str, key: str = "") -> Any:
    """Return the value of a YAML text: the value of a setting, or the settings in a file.

    A value without quotes, such as 0123 or no, stays text where the setting is text.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _keep_text(node, key)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _keep_text(node: yaml.Node, key: str) -> None:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if isinstance(name, yaml.ScalarNode):
                _keep_text(value, f"{key}.{name.value}".lstrip("."))
        return
    setting = all_keys().get(our_spelling(key))
    if setting is None or not setting.is_text:
        return
    for item in node.value if isinstance(node, yaml.SequenceNode) else [node]:
        if item.tag in _CONVERTED:
            item.tag = "tag:yaml.org,2002:str"


_TYPES = {list: "a list", str: "text", int: "a number", float: "a number"}


def read_file(source: str | Path) -> dict[str, Any]:
    """Read the settings in a YAML file.

    Raises InputError if `source` is not a path, or if the file is missing, is not YAML or does not
    contain a mapping.
    """
    try:
        path = Path(place_text(source))
    except ValueError as error:
        fix = "give a YAML file, or its content as a mapping"
        raise InputError([f"settings: {error}; {fix}"]) from error
    if path.name.startswith("--config"):
        raise InputError([_verl_option(str(path))])
    if _is_override(path):
        key = str(path).partition("=")[0]
        fix = f"expected a settings file before it, as in: retrace check my.yaml {key}=..."
        raise InputError([f"{path}: found a setting, {fix}"])
    if path.suffix == ".sh":
        raise InputError(
            [
                f"{path}: found a shell script, expected a settings file; to import a verl script, "
                f"run: retrace import-verl {path} -o my.yaml"
            ]
        )
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(
            [
                f"{path}: the settings file does not exist (searched from {Path.cwd()}); give the "
                "path to a YAML file, such as examples/quickstart.yaml"
            ]
        ) from error
    except (IsADirectoryError, UnicodeDecodeError) as error:
        found = "a folder" if path.is_dir() else "not text"
        raise InputError(
            [
                f"{path}: the settings file cannot be read: it is {found}; give the path to a "
                "YAML file"
            ]
        ) from error
    except OSError as error:
        raise InputError([f"{path}: the settings file cannot be read: {error}"]) from error
    return _parsed(path, text)


def _parsed(path: Path, text: str) -> dict[str, Any]:
    """Parse a YAML file. Raises InputError if it is not YAML or does not contain a mapping."""
    try:
        content = _load(text)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        tab = "'\\t'" in str(error.problem)
        fix = "indent with spaces, not with tabs" if tab else "fix the YAML on or above this line"
        twice = "remove one" in str(error.problem)
        raise InputError(
            [f"{path}{line}: {error.problem}" + ("" if twice else f"; {fix}")]
        ) from error
    except yaml.YAMLError as error:
        raise InputError([f"{path}: not YAML: {error}"]) from error
    except RecursionError as error:
        raise InputError(
            [f"{path}: its lists or mappings are nested too deep; give a file of settings"]
        ) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(
            [
                f"{path}: found {_TYPES.get(type(content), 'a value')} at the top level, expected "
                "`key: value` lines"
            ]
        )
    return content


def _is_override(path: Path) -> bool:
    """Return whether an argument is a setting, not the path of a file whose name contains `=`."""
    is_setting = _OVERRIDE.match(str(path)) is not None
    return is_setting and path.suffix not in (".yaml", ".yml") and not path.exists()


def _verl_option(text: str) -> str:
    return (
        f"{text}: this is an option of verl's command line that names a settings folder or file; "
        "import the settings into one file: retrace import-verl FOLDER/NAME.yaml -o my.yaml"
    )


def read_mapping(settings: Mapping[Any, Any]) -> dict[str, Any]:
    """Copy settings given as Python values; convert them to the types that a YAML file yields.

    Raises InputError for a key that is not text, and for mappings and lists that are nested too
    deep.
    """
    read: dict[str, Any] = _plain(settings)
    return read


def read_pair(key: str, value: Any) -> tuple[list[str], Any]:
    """Return the path and value of an override given in Python.

    Raises InputError if `key` is not a dotted key.
    """
    if not isinstance(key, str) or "" in (parts := key.split(".")):
        raise InputError([f"{key!r}: expected the dotted key of a setting, such as trainer.seed"])
    return parts, _plain(value)


def _plain(value: Any, depth: int = 64) -> Any:
    if isinstance(value, Path):
        return str(value)
    if not isinstance(value, Mapping | list | tuple):
        return value
    if depth == 0:
        fix = "write each value out"
        raise InputError([f"settings: nested more than 64 deep, or part of itself; {fix}"])
    if not isinstance(value, Mapping):
        return [_plain(item, depth - 1) for item in value]
    if strange := [key for key in value if not isinstance(key, str)]:
        raise InputError(
            [f"settings: found the key {strange[0]!r}, expected the name of a setting"]
        )
    return {key: _plain(item, depth - 1) for key, item in value.items()}


def read_override(text: str) -> tuple[list[str], Any]:
    """Return the path and value of `key.path=value`. Raises InputError for any other text.

    Hydra's `+` and `++` before the key are accepted and have no effect, because every key must be
    known anyway. The value is YAML, so mode="R2", mode=R2 and mode='R2' are equivalent.
    """
    match = _OVERRIDE.match(text)
    if text.startswith("--config"):
        raise InputError([_verl_option(text)])
    if match is None:
        raise InputError([f"{text}: expected key.path=value{_override_hint(text)}"])
    key, value = match["key"], match["value"]
    parts = key.split(".")
    if "" in parts:
        raise InputError([f"{text}: the key {key!r} has an empty part; expected key.path=value"])
    return parts, _read_value(key, value)


def _override_hint(text: str) -> str:
    if text.startswith("~"):
        return "; to remove a setting, leave it out"
    if text.startswith("-") and _OVERRIDE.match(text.lstrip("-")):
        return "; leave out the " + "-" * (len(text) - len(text.lstrip("-")))
    return ", without spaces around =, for example trainer.total_training_steps=200"


def _read_value(key: str, value: str) -> Any:
    if value == "":
        return ""
    try:
        parsed = _load(value, key)
    except yaml.YAMLError as error:
        if value[0] in "[{" and "<stream end>" in str(error):  # a shell split it at a space
            whole = "[a, b]" if value[0] == "[" else "{a: 1, b: 2}"
            raise InputError(
                [
                    f"{key}: found {value!r}, which ends too early; quote the whole setting in "
                    f"single quotes: '{key}={whole}'"
                ]
            ) from error
        raise InputError(
            [f"{key}: found {value}, which is not a YAML value; quote it: {key}='\"...\"'"]
        ) from error
    if isinstance(parsed, dict) and any(v is None and ":" in str(k) for k, v in parsed.items()):
        raise InputError([f"{key}: found {value}; write a space after each colon: {{a: 1, b: 2}}"])
    return parsed
