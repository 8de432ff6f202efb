"""Read a verl shell script: find the command that starts verl's trainer."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from pipeline.config.imports.bash import BashOutput, Command, Script, read_names, run_script
from pipeline.errors import InputError

_MODULE = "verl.trainer.main_ppo"
_MODULES = (_MODULE, "recipe.dapo.main_dapo")
"""Modules of verl's trainers. The second module, from the DAPO recipe, adds dynamic sampling."""
_FILES = tuple(f"{module.replace('.', '/')}.py" for module in _MODULES)
_QUOTED = re.compile(
    rf"-m\s+(?:{'|'.join(map(re.escape, _MODULES))})\b|(?:{'|'.join(map(re.escape, _FILES))})\b"
)
"""A trainer's command inside an argument of another command, as in bash -c "python3 -m ..."."""
_DEEPEST = 4
"""Maximum number of scripts that call each other."""
_UNKNOWN = re.compile(r"@not-known:(?P<line>\d+):(?P<command>[^@]*)@|@not-set:(?P<name>\w+)@")
_PLACES = re.compile(r"(?<![\w./-])(?:cd|pwd|pushd|realpath|git rev-parse)\b|\$\{?PWD\b")
"""Commands and variables whose results may depend on the folder in which the script starts."""


@dataclass(frozen=True)
class TrainerCommand:
    """The command with which a script starts verl's trainer."""

    line: str
    """The line of the script, which may call the command in another script."""
    arguments: tuple[str, ...]
    """Settings as `key=value`, and options such as `--config-name=...`."""
    folder: Path
    """The working folder of the trainer."""
    environment: Mapping[str, str]
    """The environment of the trainer."""
    launcher: tuple[str, ...]
    """The words of the command before the trainer, such as `env`, `A=1`, `python3` and `-m`."""
    missing: frozenset[str]
    """The variables without a value that the script or the scripts that it calls read."""
    reads: frozenset[str] = frozenset()
    """The variables that the script itself reads."""
    notes: tuple[str, ...] = ()
    """Notes on the assumed working folder, and on each other program of the script."""


def read_script(path: Path, variables: Mapping[str, str]) -> TrainerCommand:
    """Return the command with which a script starts `verl.trainer.main_ppo` or DAPO's trainer.

    The script starts in the working folder of this process, as with `bash PATH`. `variables` is the
    script's environment. Raises InputError if the script cannot be read, if bash refuses one of its
    lines, or if it does not start exactly one trainer.
    """
    script = Script(path, _text(path), variables, Path.cwd())
    evaluation, found = _evaluated(script)
    if not found:
        raise InputError([_none(path, script.text, evaluation)])
    if len({each.arguments for each in found}) > 1:
        lines = ", ".join(each.line for each in found)
        raise InputError(
            [
                f"{path}: lines {lines} each start {_MODULE}; keep one of them in a copy of the "
                "script"
            ]
        )
    trainer = found[0]
    starts = {each.line for each in found}
    notes = [
        f"line {each.line}: `{each.words[0]}` was not run"
        for each in evaluation.commands
        if each.words[0] != "exit" and each.line not in starts
    ]
    if _PLACES.search(script.text):
        notes.insert(0, f"the script was read as if `bash {path}` was run in {script.folder}")
    return replace(
        trainer,
        arguments=_with_missing(script, trainer),
        reads=read_names(script.text),
        notes=tuple(dict.fromkeys(notes)),
    )


def unknown_part(value: str) -> str | None:
    """Return why a value is unknown, or None if it is known.

    A value is unknown if it contains the output of a program, because no program is run, or if it
    contains a variable that is not set.
    """
    found = _UNKNOWN.search(value)
    if found is None:
        return None
    if name := found["name"]:
        return (
            f"the variable {name} of the script is not set; set it before the command: {name}=... "
            "retrace import-verl ..., or write the value"
        )
    return (
        f"line {found['line']} of the script takes this value from `{found['command']}`, which was "
        "not run"
    )


def written_value(value: str) -> str:
    """Return a value with its unknown parts as in the script: `$(date)`, `$DATA`."""
    return _UNKNOWN.sub(lambda u: f"${u['name']}" if u["name"] else f"$({u['command']})", value)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError([f"{path}: the script cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise InputError([f"{path}: the script cannot be read: the file is not text"]) from error


def _evaluated(script: Script, depth: int = 0) -> tuple[BashOutput, list[TrainerCommand]]:
    """Evaluate a script, and the scripts that it calls. Raises InputError for bash's errors."""
    result = run_script(script)
    lines = script.text.splitlines()
    problems = [
        f"{script.path}, line {line}: {_error(script, ''.join(source), text)}"
        for line, text in result.errors
        for source in [lines[line - 1 : line]]
        if not _is_wait(source, text)
    ]
    if problems:
        raise InputError(problems)
    found = [one for command in result.commands for one in _trainers(script.path, command, depth)]
    return result, found


def _trainers(path: Path, command: Command, depth: int) -> Iterator[TrainerCommand]:
    """Yield the trainers that a command of a script starts, itself or through other scripts."""
    words, missing = command.words, command.missing
    for place, word in enumerate(words):
        if word in _MODULES or word.endswith(_FILES):
            yield TrainerCommand(
                command.line,
                words[place + 1 :],
                command.folder,
                command.environment,
                words[:place],
                missing,
            )
            return
    called = _called(path, command)
    if called is None or depth == _DEEPEST:
        return
    place, script = called
    for one in _evaluated(script, depth + 1)[1]:
        launcher = (*words[:place], *one.launcher)
        yield replace(one, line=command.line, launcher=launcher, missing=one.missing | missing)


def _called(path: Path, command: Command) -> tuple[int, Script] | None:
    """Return the script that a command runs, in quotes or by its name, and its place."""
    variables, folder = command.environment, command.folder
    for place, word in enumerate(command.words):
        if _QUOTED.search(word):
            # bash -c TEXT NAME ARGUMENT...
            return place, Script(path, word, variables, folder, command.words[place + 2 :])
        if word.endswith(".sh") and command.words[0] != "source" and (folder / word).is_file():
            text, arguments = _text(folder / word), command.words[place + 1 :]
            return place, Script(Path(word), text, variables, folder, arguments)
    return None


def _with_missing(script: Script, trainer: TrainerCommand) -> tuple[str, ...]:
    """Return the trainer's arguments, with marks in place of variables that have no value.

    For each such variable, the script is evaluated again with a mark as its value. An argument that
    then contains the mark, and is the same otherwise, takes a part of its value from the variable.
    """
    arguments = list(trainer.arguments)
    variables = dict(script.environment)
    for name in sorted(trainer.missing):
        mark = f"@not-set:{name}@"
        marked = replace(script, environment={**variables, name: mark})
        try:
            _, found = _evaluated(marked)
        except InputError:  # the script computes with the variable
            continue
        for argument in (word for each in found for word in each.arguments if mark in word):
            if (without := argument.replace(mark, "")) in arguments:
                arguments[arguments.index(without)] = argument
                variables[name] = mark
    return tuple(arguments)


def _is_wait(line: Sequence[str], text: str) -> bool:
    """Return whether an error concerns the output of a program for which a loop waits."""
    return bool(line) and "not-known" in text and line[0].split()[:1] in (["while"], ["until"])


def _error(script: Script, line: str, text: str) -> str:
    """Return bash's error in a line of a script, with the fix."""
    named = text.partition(":")[0].lstrip("$")
    missing = sorted(read_names(line) - script.environment.keys() if text[0] == "[" else set())
    if named.isdigit():
        fix = f"write the value in place of ${named} in a copy of the script"
    elif "restricted" in text or "not-known" in text:
        fix = "no program is run, and no file is written; write the value itself"
    elif named in read_names(script.text) or missing:
        names = " ".join(f"{name}=..." for name in missing or [named])
        fix = f"set it before the command: {names} retrace import-verl ..."
    else:
        fix = "correct the script"
    return f"{_UNKNOWN.sub(lambda u: f'`{u[2]}`', text)}; {fix}"


def _none(path: Path, text: str, evaluation: BashOutput) -> str:
    """Return why a script starts no trainer."""
    exits = [each for each in evaluation.commands if each.words[0] == "exit"]
    if exits:
        said = written_value(evaluation.output)
        return (
            f"{path}, line {exits[-1].line}: the script exits here with code {exits[-1].words[1]} "
            f"before it starts {_MODULE}"
            + (f", and its last output is {said!r}" if said else "")
            + "; set the variables that the script needs before the command (NAME=... retrace "
            "import-verl ...), or remove the line from a copy of the script"
        )
    lines = enumerate(text.splitlines(), start=1)
    if starts := [str(n) for n, line in lines if _QUOTED.search(line) and line.strip()[0] != "#"]:
        programs = dict.fromkeys(f"`{each.words[0]}`" for each in evaluation.commands)
        return (
            f"{path}: the script does not reach line {', '.join(starts)}, which starts {_MODULE}; "
            "set the variables that its conditions read before the command (NAME=... retrace "
            "import-verl ...), or keep only that command in a copy of the script"
            + (f"; not run: {', '.join(programs)}" if programs else "")
        )
    others = dict.fromkeys(
        module
        for command in evaluation.commands
        for option, module in pairwise(command.words)
        if option == "-m"
    )
    return (
        f"{path}: the script starts {', '.join(others) or 'no module'}, expected python3 -m "
        f"{_MODULE}; other trainers cannot be imported"
    )
