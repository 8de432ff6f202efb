"""Read a verl shell script: find the arguments that it passes to verl's trainer.

bash evaluates the script, so that `${VAR:-default}`, arrays, `case` and arithmetic keep their
meaning. It writes no files and starts no programs, because it runs in restricted mode with an empty
PATH. bash calls a function for each command that it does not find, and this function records the
command. The command that starts the trainer is therefore recorded, too.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import InputError
from pipeline.scratch import scratch_folder

_MODULE = "verl.trainer.main_ppo"
_MODULES = (_MODULE, "recipe.dapo.main_dapo")
"""Modules of verl's trainers. The second module, from the DAPO recipe, adds dynamic sampling."""
_LONGEST_S = 20.0
"""Time limit in seconds. A script that waits in a loop for a program would not end on its own."""

_PROLOGUE = r"""
command_not_found_handle() {
  local word
  for word in "${BASH_LINENO[0]}" "$@" $'\1'; do printf '%s:%s\0' "$BASHPID" "$word" >&@FD@; done
  case @PROBES@ in *" ${BASH_LINENO[0]} "*) ;; *)
    printf '@not-known:%s:%s@' "${BASH_LINENO[0]}" "$1";;
  esac
  return 127
}
cd() { :; }
ulimit() { :; }
exec() { "$@"; }
set() { builtin set "$@"; builtin set +e +x; }
dirname() { case $1 in */*) printf '%s\n' "${1%/*}";; *) echo .;; esac; }
basename() { local name=${1##*/}; printf '%s\n' "${name%"${2-}"}"; }
"""
_UNKNOWN = re.compile(r"@not-known:(?P<line>\d+):(?P<command>[^@]*)@")
_REDIRECTION = re.compile(r"""(?<=\s)(?:\d|&)?>>?\s*(?:"[^"]*"|'[^']*'|[^\s&|;<>()"'])+""")
_COMPLAINT = re.compile(r"^.*?: line (?P<line>\d+): (?P<text>.*)$")


@dataclass(frozen=True)
class TrainerCommand:
    """The command with which a script starts verl's trainer."""

    arguments: tuple[str, ...]
    """Settings as `key=value`, and options such as `--config-name=...`."""
    notes: tuple[str, ...]
    """One note for each other program that the script would have run."""


def read_script(path: Path, variables: Mapping[str, str]) -> TrainerCommand:
    """Return the command with which a script starts `verl.trainer.main_ppo` or DAPO's trainer.

    `variables` is the script's environment. Raises InputError if the script cannot be read, if bash
    refuses one of its lines, or if it does not start exactly one trainer.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise InputError([f"{path}: bash, which reads shell scripts, is not installed"])
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError([f"{path}: the script cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise InputError([f"{path}: the script cannot be read: the file is not text"]) from error
    records, complaints = _evaluate(bash, path, text, variables)
    commands = [(line, found) for line, *command in records if (found := _trainer(command))]
    if complaints:
        raise InputError([f"{path}, {complaint}" for complaint in complaints])
    if len(commands) != 1:
        raise InputError([_not_one(path, records, [line for line, _ in commands])])
    arguments = commands[0][1][1:]
    others = [(line, command[0]) for line, *command in records if not _trainer(command)]
    return TrainerCommand(
        tuple(arguments),
        tuple(f"line {line}: `{program}` was not run" for line, program in others),
    )


def unknown_part(value: str) -> str | None:
    """Return why a value is unknown, or None if it is known.

    A value is unknown if it contains the output of a program, because no program is run.
    """
    found = _UNKNOWN.search(value)
    if found is None:
        return None
    return (
        f"line {found['line']} of the script takes this value from `{found['command']}`, which was "
        "not run"
    )


def _evaluate(
    bash: str, path: Path, text: str, variables: Mapping[str, str]
) -> tuple[list[list[str]], list[str]]:
    """Return the commands that were not found, each with its line number, and bash's errors."""
    with scratch_folder("import") as folder, tempfile.TemporaryFile() as record:
        known = _harmless(variables)
        script, prologue = folder / "script.sh", folder / "prologue.sh"
        script.write_text(_without_redirections(text), encoding="utf-8")
        prologue.write_text(
            _PROLOGUE.replace("@FD@", str(record.fileno())).replace("@PROBES@", _probes(text))
        )
        try:
            said = _said_by(
                [bash, "--restricted", "--norc", "--noprofile", str(script)],
                {**known, "PATH": str(folder / "none"), "BASH_ENV": str(prologue)},
                record.fileno(),
            )
        except subprocess.TimeoutExpired as error:
            raise InputError(
                [f"{path}: the script does not end on its own when no program is run"]
            ) from error
        record.seek(0)
        written = record.read().decode(errors="replace").replace(str(script), str(path))
    return _records(written), [
        _complaint(line) for line in said.splitlines() if _COMPLAINT.match(line)
    ]


def _records(written: str) -> list[list[str]]:
    """Assemble the commands from their words.

    Each word follows the id of the process that wrote it, because the parts of a pipe write at the
    same time.
    """
    records: list[list[str]] = []
    begun: dict[str, list[str]] = {}
    for process, _, word in (entry.partition(":") for entry in written.split("\0")[:-1]):
        if word == "\1":
            records.append(begun.pop(process))
        else:
            begun.setdefault(process, []).append(word)
    return records


def _said_by(command: Sequence[str], environment: Mapping[str, str], record: int) -> str:
    """Return bash's output to stderr. Raises TimeoutExpired.

    bash gets its own process group, because some scripts kill their group (`trap "kill 0" EXIT`).
    The group is killed at the end, because loops in subshells would continue.
    """
    with subprocess.Popen(
        command, env=environment, pass_fds=[record], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as bash:  # fmt: skip
        try:
            _, said = bash.communicate(timeout=_LONGEST_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # no process of the group is left
                os.killpg(bash.pid, signal.SIGKILL)
    return said.decode(errors="replace")


def _probes(text: str) -> str:
    """Return the numbers of the lines whose result may depend on whether a program succeeds.

    An example is `$(PROGRAM && echo yes || echo no)`. No program is run, so PROGRAM always fails.
    The result is a list in quotes, for bash.
    """
    lines = [
        str(number)
        for number, line in enumerate(text.splitlines(), start=1)
        if "$(" in line and ("&&" in line or "||" in line)
    ]
    return f"' {' '.join(lines)} '"


def _without_redirections(text: str) -> str:
    """Return the script without redirections to files, which restricted mode refuses.

    Line numbers do not change. A `>` that may be a comparison, or may be in quotes, is kept.
    """
    return "\n".join(_without_redirection(line) for line in text.split("\n"))


def _without_redirection(line: str) -> str:
    if "((" in line or "[[" in line or line.lstrip().startswith("#"):
        return line
    return _REDIRECTION.sub(
        lambda found: found[0] if _in_quotes(line[: found.start()]) else " ", line
    )


def _in_quotes(before: str) -> bool:
    return before.count('"') % 2 == 1 or before.count("'") % 2 == 1


def _harmless(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables, except those that make bash or the dynamic loader run other code."""
    refused = ("BASH", "LD_", "SHELLOPTS", "ENV", "PS4", "PROMPT_COMMAND")
    return {name: value for name, value in variables.items() if not name.startswith(refused)}


def _complaint(line: str) -> str:
    found = _COMPLAINT.match(line)
    assert found is not None
    text = found["text"]
    if text.endswith("unbound variable"):
        name = text.partition(":")[0]
        fix = f"set it before the command: {name}=... retrace import-verl ..."
    elif "restricted" in text or "not-known" in text:
        fix = "no program is run, and no file is written or sourced; write the value itself"
    else:
        fix = "correct the script"
    return f"line {found['line']}: {_UNKNOWN.sub(lambda u: f'`{u[2]}`', text)}; {fix}"


def _trainer(command: list[str]) -> list[str]:
    """Return the command starting at the trainer's name, or an empty list for any other command."""
    for place, argument in enumerate(command):
        if argument in _MODULES or argument.endswith("verl/trainer/main_ppo.py"):
            return command[place:]
    return []


def _not_one(path: Path, records: list[list[str]], lines: list[str]) -> str:
    if lines:
        return (
            f"{path}: lines {', '.join(lines)} each start {_MODULE}; keep one of them in a copy of "
            "the script"
        )
    others = [command[i + 1] for _, *command in records for i in _modules(command)]
    started = ", ".join(dict.fromkeys(others)) if others else "no module"
    return (
        f"{path}: the script starts {started}, expected python3 -m {_MODULE}; other trainers "
        "cannot be imported"
    )


def _modules(command: list[str]) -> list[int]:
    return [i for i, argument in enumerate(command[:-1]) if argument == "-m"]
