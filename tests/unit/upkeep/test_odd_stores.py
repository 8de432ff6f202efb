"""`verify` names a bad entry in a store, even if it is not an object, and still finds other
defects."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from pipeline.cli.printable import printable, printable_message
from pipeline.cli.trace_tables import sample_lines
from pipeline.run import keys
from pipeline.run.commit import CONTENT_SHA256, content_digest, new_write_id
from pipeline.store import Store, open_store
from pipeline.traces import seal, write_shard
from pipeline.upkeep.verify import plans, verify
from tests.forging import Forgery
from tests.memory_store import MemoryStore
from tests.samples import GEOMETRY, R3, make_samples, sealed_r3
from tests.stored_runs import whole_run

TWO_STEPS = (0, 1)


def made(store: Store, step: int) -> None:
    samples = make_samples(step=step)
    write_shard(store, step, 0, new_write_id(), samples, GEOMETRY, R3)
    seal(store, step, 1, lambda _: [sample.id for sample in samples], 0)


@pytest.fixture
def root(tmp_path) -> Path:
    """A store with two good steps."""
    for step in TWO_STEPS:
        made(open_store(str(tmp_path)), step)
    return tmp_path


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def zero(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(20 << 30)


def circle(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("..")


def nowhere(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("nowhere")


def itself(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


KINDS = [fifo, zero, sparse, circle, nowhere, itself]
COMMANDS = [
    ["traces", "ls"],
    ["traces", "ls", "--step", "0"],
    ["traces", "show", "000000/1/0"],
    ["traces", "verify"],
    ["traces", "stats"],
    ["traces", "export", "--out", "OUT"],
    ["traces", "sweep", "--dry-run"],
    ["traces", "prune", "--keep-steps", "1", "--dry-run"],
]


PROGRAM = """
import json, resource, sys, traceback
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from typer.testing import CliRunner
from pipeline.cli import _app
for command in json.loads(sys.argv[1]):
    result = CliRunner().invoke(_app, command)
    done = isinstance(result.exception, SystemExit | None)
    why = "" if done else "".join(traceback.format_exception(result.exception))
    print(json.dumps([command, result.exit_code, result.output, why]))
"""


def run(commands: list[list[str]], root: Path) -> list[tuple[list[str], str]]:
    """Run `retrace` commands, limited to one minute and 4 GiB of address space.

    Return each command with its output.
    """
    words = [list(command) for command in commands]
    for command in words:
        if command[0] == "traces":
            command.insert(2, str(root))
        if "OUT" in command:
            command[command.index("OUT")] = str(root.parent / f"{root.name}-out")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(words)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env=environment,
    )
    found = []
    for line in done.stdout.splitlines():
        command, code, output, why = json.loads(line)
        assert not why, (command, why)
        assert code in (0, 1, 2), (command, output)
        found.append((command, output))
    assert len(found) == len(commands)
    return found


def names(root: Path, step: int = 0) -> list[Path]:
    return sorted(p for p in (root / f"steps/{step:06d}").rglob("*") if p.is_file())


@pytest.mark.parametrize("kind", KINDS)
def test_verify_names_the_entry_and_continues(root, kind):
    """The entry replaces each object of step 0 in turn, while step 1 has a damaged file."""
    (other,) = root.glob("steps/000001/rollout/00000.*.samples.parquet")
    other.write_bytes(other.read_bytes()[:-1])
    for path in names(root):
        content = path.read_bytes()
        kind(path)
        found = {problem.key for problem in verify(open_store(str(root))).problems}
        key = path.relative_to(root).as_posix()
        assert key in found or (kind is circle and any(key in name for name in found)), key
        assert other.relative_to(root).as_posix() in found
        path.unlink()
        path.write_bytes(content)


@pytest.mark.parametrize("kind", [fifo, itself])
def test_verify_lists_an_entry_of_a_run_once(tmp_path, kind):
    """The listing, the check of the object and the checks that use it find the same problem."""
    whole_run(open_store(str(tmp_path / "run")), tmp_path, "R2")
    for path in sorted((tmp_path / "run").rglob("*")):
        key = path.relative_to(tmp_path / "run").as_posix()
        if not path.is_file() or key.startswith("inputs/"):
            continue
        content = path.read_bytes()
        kind(path)
        problems = verify(open_store(str(tmp_path / "run"))).problems
        texts = [problem.text for problem in problems if problem.key == key]
        assert [text.endswith("; remove it") for text in texts] == [True], (key, texts)
        assert not any("UnboundLocalError" in str(problem) for problem in problems)
        path.unlink()
        path.write_bytes(content)


@pytest.mark.parametrize("kind", KINDS)
def test_no_command_hangs_or_prints_a_traceback(root, kind):
    """Each command reports its findings and exits."""
    kind(root / "steps/000000/manifest.json")
    kind(root / "steps/000001/pruned.json")
    kind(root / "run.json")
    run([*COMMANDS, ["runs", "ls", str(root.parent)]], root)


def test_no_command_hangs_on_a_data_file(root):
    (path,) = root.glob("steps/000000/rollout/00000.*.samples.parquet")
    fifo(path)
    run(COMMANDS, root)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RecursionError("deep"), OverflowError(), pa.ArrowInvalid("no"), OSError("io")],
)
def test_an_error_of_a_library_is_reported_for_its_object(monkeypatch, error):
    store = MemoryStore()
    for step in TWO_STEPS:
        made(store, step)
    store.create(keys.plan(0), b"{}")
    real = plans.find_signed_plan

    def fails(store, key):
        if key == keys.plan(0):
            raise error
        return real(store, key)

    monkeypatch.setattr(plans, "find_signed_plan", fails)
    report = verify(store)
    assert [problem.key for problem in report.problems] == [keys.plan(0)]
    assert type(error).__name__ in report.problems[0].text
    assert report.steps == 2


FILE = {"key": "policies/000001/x", "size": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "files",
    [
        None,
        {},
        ["x"],
        [{}],
        [{**FILE, "size": {}}],
        [{**FILE, "size": 1 << 70}],
        [{**FILE, "key": "/"}],
    ],
)
def test_an_invalid_list_of_files_is_named(tmp_path, files):
    """The list is in a policy commit that matches its own digest."""
    store = open_store(str(tmp_path / "run"))
    whole_run(store, tmp_path)
    path = tmp_path / "run" / keys.policy(1)
    signed(path, files=files)
    problems = verify(store).problems
    assert any(p.key == keys.policy(1) and "files" in p.text for p in problems)


ESCAPE = "\x1b]0;owned\x07\x9b31m\u202e\nsteps: all good"


def signed(path: Path, **changes) -> None:
    body = {**json.loads(path.read_bytes()), **changes}
    body.pop(CONTENT_SHA256)
    path.write_text(json.dumps({**body, CONTENT_SHA256: content_digest(body)}))


def test_control_characters_never_reach_a_terminal(tmp_path):
    """The texts are ids, engines, errors and keys with control characters or Rich markup."""
    samples = [
        replace(s, reward=None, reward_error=f"{ESCAPE}[/bold][red]", extras={ESCAPE: ESCAPE})
        for s in make_samples()
    ]
    root = tmp_path / "store"
    sealed_r3(open_store(str(root)), samples)
    manifest = root / "steps/000000/manifest.json"
    body = json.loads(manifest.read_bytes())
    signed(manifest, provenance={**body["provenance"], "engine": "[/bold] x"})
    (root / f"steps/000000/{ESCAPE.replace('/', '')}").write_text("x")
    for command, said in run([*COMMANDS, ["runs", "ls", str(root.parent)]], root):
        assert not [c for c in said if not c.isprintable() and c != "\n"], (command, said)
        assert not any(line.startswith("steps: all good") for line in said.splitlines())
    ((_, shown),) = run([["traces", "ls", "--step", "0"]], root)
    assert "[/bold][red]" in shown, shown
    assert "\\x1b" in shown


@pytest.mark.parametrize("character", ["x", "\x1f"])
def test_an_id_of_a_million_characters_is_cut_off(character, tmp_path):
    """Without this, rich takes minutes to print an error that contains such an id."""
    store = MemoryStore()
    sealed_r3(store, make_samples())
    forgery = Forgery(store)
    for row in forgery.rows:
        row["id"] = character * 1_000_000
    root = tmp_path / "store"
    for key, data in forgery.sealed().objects.items():
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(data)
    for command, said in run(COMMANDS, root):
        assert len(said) < 20_000, (command, len(said))


def test_valid_ids_and_the_texts_of_samples_are_not_cut_off():
    """A valid id has at most 1,024 bytes. A text may have no spaces at all."""
    for id in ("x" * 1_024, "\u00ad" * 512, "\U000e0001" * 256):
        assert printable_message(id) == printable(id)
    text = "\u597d" * 9_000
    tokenizer = SimpleNamespace(there=True)
    sample = SimpleNamespace(
        **vars(make_samples()[0]) | {"tokenizer": tokenizer},
        prompt_text=text,
        response_text=text,
    )
    assert sample_lines(sample, None)[-2:] == [f"prompt    {text!r}", f"response  {text!r}"]
    assert printable(text) == text
