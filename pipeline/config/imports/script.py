"""A verl shell script: the arguments that it gives to verl's trainer.

bash itself evaluates the script, so that `${VAR:-default}`, arrays, `case` and arithmetic mean what
they mean; but no program is started. bash runs in its restricted mode, which writes no files, with
an empty PATH, and a function takes down each command that is then not found. The trainer's command
is one of them.
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
"""The second is DAPO's trainer of verl's recipes, which adds dynamic sampling to the first."""
_LONGEST_S = 20.0
"""For a script that loops, waiting for what no program does."""

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
    """What a script gives to verl's trainer."""

    arguments: tuple[str, ...]
    """`key=value`, and options such as `--config-name=...`."""
    notes: tuple[str, ...]
    """Programs that the script would have run before or around it."""


def read_script(path: Path, variables: Mapping[str, str]) -> TrainerCommand:
    """The command of a script that starts verl's trainer, `verl.trainer.main_ppo` or DAPO's.

    `variables` are those of its environment. Raises InputError, naming lines: the script cannot be
    read, bash refuses a line of it, no or several trainers are started.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise InputError([f"{path}: bash, which reads shell scripts, is not installed"])
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError([f"{path}: the script cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise InputError([f"{path}: the script cannot be read: it is no text"]) from error
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
    """Why a value is not known: it has the output of a program that was not run. None: it is."""
    found = _UNKNOWN.search(value)
    if found is None:
        return None
    return (
        f"line {found['line']} of the script takes it from `{found['command']}`, which was not run"
    )


def _evaluate(
    bash: str, path: Path, text: str, variables: Mapping[str, str]
) -> tuple[list[list[str]], list[str]]:
    """The commands that were not found, each after its line, and bash's complaints."""
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
                [f"{path}: the script does not end by itself when no program is run"]
            ) from error
        record.seek(0)
        written = record.read().decode(errors="replace").replace(str(script), str(path))
    return _records(written), [
        _complaint(line) for line in said.splitlines() if _COMPLAINT.match(line)
    ]


def _records(written: str) -> list[list[str]]:
    """The commands from their words, each of which stands behind the process that wrote it: the
    parts of a pipe write at once."""
    records: list[list[str]] = []
    begun: dict[str, list[str]] = {}
    for process, _, word in (entry.partition(":") for entry in written.split("\0")[:-1]):
        if word == "\1":
            records.append(begun.pop(process))
        else:
            begun.setdefault(process, []).append(word)
    return records


def _said_by(command: Sequence[str], environment: Mapping[str, str], record: int) -> str:
    """What bash writes to stderr. Raises TimeoutExpired.

    Its process group is its own, for scripts that end theirs (`trap "kill 0" EXIT`), and ends with
    it, as loops in subshells would go on.
    """
    with subprocess.Popen(
        command, env=environment, pass_fds=[record], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as bash:  # fmt: skip
        try:
            _, said = bash.communicate(timeout=_LONGEST_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing is left of it
                os.killpg(bash.pid, signal.SIGKILL)
    return said.decode(errors="replace")


def _probes(text: str) -> str:
    """The lines with `$(PROGRAM && echo yes || echo no)`, as words: none succeeds."""
    lines = [
        str(number)
        for number, line in enumerate(text.splitlines(), start=1)
        if "$(" in line and ("&&" in line or "||" in line)
    ]
    return f"' {' '.join(lines)} '"


def _without_redirections(text: str) -> str:
    """The script without output to files, which the restricted mode refuses.

    Lines stay where they are. A `>` that may be a comparison or stand in quotes is left alone.
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
    """Without what would make bash, or the loader of programs, run something else first."""
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
        fix = "no program is run and no file written or sourced here; write the value itself"
    else:
        fix = "correct the script"
    return f"line {found['line']}: {_UNKNOWN.sub(lambda u: f'`{u[2]}`', text)}; {fix}"


def _trainer(command: list[str]) -> list[str]:
    """The command from the trainer's name on; empty if it starts something else."""
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
    found = f"it starts {', '.join(dict.fromkeys(others))}" if others else "it starts no module"
    return f"{path}: {found}, expected python3 -m {_MODULE}; other trainers cannot be imported"


def _modules(command: list[str]) -> list[int]:
    return [i for i, argument in enumerate(command[:-1]) if argument == "-m"]
