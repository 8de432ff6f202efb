"""BashOutput of a shell script by bash, which starts no programs and writes no files.

bash evaluates the script, so that `${VAR:-default}`, arrays, `case` and arithmetic keep their
meaning. It runs in restricted mode, and PATH contains only programs that compute with paths. bash
calls a function for each command that it does not find, and this function records the command. Some
commands of bash are replaced by functions that record or imitate them (prologue.sh).
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import InputError
from pipeline.scratch import scratch_folder

_LONGEST_S = 20.0
"""Time limit in seconds. A script that waits for a file would not end on its own."""
_MOST_BYTES = 100_000
"""Maximum length of a script. Linux limits the length of a single argument to 128 KiB."""
_WAITS = 100
"""Number of executions after which a line counts as a loop that waits for a program."""
_HARMLESS = ("basename", "dirname", "expr", "readlink", "realpath", "seq")
"""The programs that a script may run. They only compute, or read symbolic links."""

_REDIRECTION = re.compile(
    r"""(?<=\s)(?:\d|&)?>>?\s*(?:>\([^)]*\)|(?:"[^"]*"|'[^']*'|[^\s&|;<>()"'])+)"""
)
_FILE_TEST = re.compile(
    r"""(?P<before>(?:(?<!\S)\[\[?|\btest|&&|\|\|)\s+(?:!\s+)?-[a-hkprsuwxGLNOS]\s+)"""
    r"""(?P<file>(?:"[^"]*"|'[^']*'|\$\{[^}]*\}|[^\s"';&|()\]])+)"""
)
"""A test of a file, as in `[ -f FILE ]` or `[[ ! -d FILE ]]`."""
_PATH_VARIABLE = re.compile(r"(?<![\w./$-])PATH(?=\+?=)|(?<=\$)PATH\b|(?<=\$\{)PATH\b")
_READ = re.compile(r"\$\{?([A-Za-z_]\w*)")
_WITH_SLASH = re.compile(r"(?P<name>[\w.+/-]+): restricted: cannot specify `/' in command names")


@dataclass(frozen=True)
class Script:
    """A script, or a command in quotes, that bash evaluates."""

    path: Path
    """The path of the script, as on bash's command line; it becomes `$0`."""
    text: str
    environment: Mapping[str, str]
    """The script's environment."""
    folder: Path
    """The folder in which the script starts."""
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """A command that bash did not run."""

    line: str
    """The line of the script, followed by the name of the file if another file contains it."""
    words: tuple[str, ...]
    folder: Path
    """The working folder."""
    environment: Mapping[str, str]
    """The environment of the command."""
    missing: frozenset[str]
    """The variables that the script reads, but that had no value."""


@dataclass(frozen=True)
class BashOutput:
    """The result of evaluating a script."""

    commands: tuple[Command, ...]
    errors: tuple[tuple[int, str], ...]
    """bash's own errors, each as the line and the text."""
    output: str
    """The last lines that the script wrote, to stderr or, if there are none, to stdout."""


@dataclass
class _Learned:
    """What earlier evaluations of the same script have found out."""

    programs: set[str] = field(default_factory=set)
    """Commands with a slash in their names, which restricted mode refuses."""
    files: list[Path] = field(default_factory=list)
    """Files that the script sources."""


def run_script(script: Script) -> BashOutput:
    """Evaluate a script without running programs or writing files.

    Raises InputError if bash is not installed, or if the script is too long or does not end.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise InputError([f"{script.path}: bash, which reads shell scripts, is not installed"])
    if len(script.text.encode()) > _MOST_BYTES:
        raise InputError(
            [f"{script.path}: found a script of more than {_MOST_BYTES} bytes; shorten it"]
        )
    learned = _Learned()
    while True:
        result = _evaluate(bash, script, learned)
        before = len(learned.programs) + len(learned.files)
        learned.programs |= {
            found["name"] for _, text in result.errors if (found := _WITH_SLASH.match(text))
        }
        learned.files += _sourced(result.commands, learned.files)
        if len(learned.programs) + len(learned.files) == before:
            return result


def read_names(text: str) -> frozenset[str]:
    """Return the names of the variables that a script reads."""
    return frozenset(_READ.findall(text))


def _evaluate(bash: str, script: Script, learned: _Learned) -> BashOutput:
    with scratch_folder("import") as scratch, tempfile.TemporaryFile() as record:
        prologue = scratch / "prologue.sh"
        prologue.write_text(_prologue(scratch, script, record.fileno(), learned))
        environment = {
            **_harmless(script.environment),
            "PATH": f"{_programs(scratch)}:{_copies(scratch, learned.files)}",
            "BASH_ENV": str(prologue),
            "PWD": str(script.folder),
        }
        text = _harmless_text(script.text)
        command = [bash, "--restricted", "--norc", "--noprofile", "-c", text, str(script.path)]
        try:
            stdout, stderr = _written_by(
                [*command, *script.arguments], environment, record.fileno()
            )
        except subprocess.TimeoutExpired as error:
            raise InputError(
                [f"{script.path}: the script does not end on its own when no program is run"]
            ) from error
        record.seek(0)
        written = record.read().decode(errors="replace")
        for number, file in enumerate(learned.files):
            copy = str(scratch / "files" / _copy_name(number))
            written, stderr = written.replace(copy, str(file)), stderr.replace(copy, str(file))
    return _read(script.path, written, stdout, stderr)


def _prologue(scratch: Path, script: Script, record: int, learned: _Learned) -> str:
    """Return what bash executes before the script."""
    programs = (
        f'function {name} {{ _retrace_program "${{BASH_LINENO[0]}}" {name} "$@"; }}'
        for name in sorted(learned.programs)
    )
    names = {
        "FD": str(record),
        "FOLDER": str(scratch),
        "WAITS": str(_WAITS),
        "PROBES": f"' {' '.join(_probes(script.text))} '",
        "READ": " ".join(sorted(read_names(script.text))),
        "SCRIPT": shlex.quote(str(script.path)),
        "PATH": shlex.quote(script.environment.get("PATH", "")),
        "SOURCED": " ".join(
            f"[{shlex.quote(str(file))}]={_copy_name(number)}"
            for number, file in enumerate(learned.files)
        ),
        "PROGRAMS": "\n".join(programs),
    }
    content = Path(__file__).with_name("prologue.sh").read_text(encoding="utf-8")
    return re.sub(rf"@({'|'.join(names)})@", lambda found: names[found[1]], content)


def _programs(scratch: Path) -> Path:
    """Return a new folder with links to the programs that the script may run."""
    folder = scratch / "programs"
    folder.mkdir()
    for name in _HARMLESS:
        if (program := shutil.which(name)) is not None:
            (folder / name).symlink_to(program)
    return folder


def _copies(scratch: Path, files: Sequence[Path]) -> Path:
    """Return a new folder with copies of sourced files that neither run programs nor write."""
    folder = scratch / "files"
    folder.mkdir()
    for number, file in enumerate(files):
        (folder / _copy_name(number)).write_text(_harmless_text(file.read_text(errors="replace")))
    return folder


def _copy_name(number: int) -> str:
    return f"_retrace_file_{number}"


def _sourced(commands: Sequence[Command], known: Sequence[Path]) -> list[Path]:
    """Return the readable files that a script sources, except for those already known."""
    found = (Path(c.words[1]) for c in commands if c.words[0] == "source" and len(c.words) > 1)
    return [
        file
        for file in dict.fromkeys(found)
        if file not in known and file.is_file() and os.access(file, os.R_OK)
    ]


def _read(path: Path, written: str, stdout: str, stderr: str) -> BashOutput:
    """Assemble the result from the records and from bash's output."""
    commands: list[Command] = []
    begun: dict[str, list[str]] = {}
    for process, _, word in (entry.partition(":") for entry in written.split("\0")[:-1]):
        if word == "\2":
            commands.append(_command(begun.pop(process)))
        else:
            begun.setdefault(process, []).append(word)
    waits = {line for line, times in Counter(c.line for c in commands).items() if times > _WAITS}
    error = re.compile(
        rf"(?:{re.escape(str(path))}|(?P<file>/.*?)): (?:-c: |eval: )?line (?P<line>\d+): "
        r"(?P<text>.*)"
    )
    errors, others = [], []
    for line in stderr.splitlines():
        if found := error.fullmatch(line):
            where = f" (in {found['file']})" if found["file"] else ""
            errors.append((found["line"], found["text"] + where))
        elif not line.startswith("+"):  # the trace of `set -x`
            others.append(line)
    # A loop that waits repeats the errors that it makes when it compares the output of a program.
    kept = [each for each, times in Counter(errors).items() if times < _WAITS]
    return BashOutput(
        tuple(commands),
        tuple((int(line), text) for line, text in kept if line not in waits),
        "\n".join((others or stdout.splitlines())[-3:]),
    )


def _command(fields: list[str]) -> Command:
    end = fields.index("\1")
    line, *words = fields[:end]
    folder, *variables = fields[end + 1 :]
    return Command(
        line,
        tuple(words),
        Path(folder),
        dict(each.split("=", 1) for each in variables if "=" in each),
        frozenset(each for each in variables if "=" not in each),
    )


def _written_by(
    command: Sequence[str], environment: Mapping[str, str], record: int
) -> tuple[str, str]:
    """Return bash's output to stdout and to stderr. Raises TimeoutExpired.

    bash gets its own process group, because some scripts kill their group (`trap "kill 0" EXIT`).
    The group is killed at the end, because loops in subshells would continue.
    """
    with subprocess.Popen(
        command, env=environment, pass_fds=[record], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as bash:  # fmt: skip
        try:
            stdout, stderr = bash.communicate(timeout=_LONGEST_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # no process of the group is left
                os.killpg(bash.pid, signal.SIGKILL)
    return stdout.decode(errors="replace"), stderr.decode(errors="replace")


def _probes(text: str) -> list[str]:
    """Return the numbers of the lines whose result may depend on whether a program succeeds.

    An example is `$(PROGRAM && echo yes || echo no)`. No program is run, so PROGRAM always fails.
    """
    return [
        str(number)
        for number, line in enumerate(text.splitlines(), start=1)
        if ("$(" in line or "`" in line) and ("&&" in line or "||" in line)
    ]


def _harmless_text(text: str) -> str:
    """Return a script without what restricted mode refuses. Line numbers do not change.

    Redirections to files are removed. A `>` that may be a comparison, or may be in quotes, is kept.
    Tests of files look in the folder that the script's `cd` selects. PATH and BASH_SOURCE become
    variables without a meaning for bash.
    """
    text = "\n".join(_without_redirection(line) for line in text.split("\n"))
    text = re.sub(r"\b(?:builtin|command) +(?=(?:cd|pwd|source|exit) )", "", text)
    text = _FILE_TEST.sub(r"\g<before>$(_retrace_tested \g<file>)", text)
    return _PATH_VARIABLE.sub("_retrace_PATH", text).replace("BASH_SOURCE", "_retrace_source")


def _without_redirection(line: str) -> str:
    if line.lstrip().startswith("#"):
        return line
    end = max(line.rfind("]]"), line.rfind("))"))
    if end < 0 and ("((" in line or "[[" in line):
        return line
    return _REDIRECTION.sub(
        lambda found: found[0] if found.start() < end or _in_quotes(line[: found.start()]) else " ",
        line,
    )


def _in_quotes(before: str) -> bool:
    return before.count('"') % 2 == 1 or before.count("'") % 2 == 1


def _harmless(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables, except those that make bash or the dynamic loader run other code."""
    refused = ("BASH", "LD_", "SHELLOPTS", "ENV", "PS4", "PROMPT_COMMAND", "_retrace_")
    return {name: value for name, value in variables.items() if not name.startswith(refused)}
