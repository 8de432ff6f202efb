"""The results from readers, `verify` and the commands for a case, and the verdict on them."""

import itertools
import json
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

import retrace
from pipeline.cli.traces import app
from pipeline.run import keys
from pipeline.store import Store, StoreError, open_store
from pipeline.traces import (
    Routes,
    RouteStream,
    Sample,
    SampleStream,
    TraceError,
    check_shard,
    open_manifest,
    open_shard,
    read_manifest,
    read_routes,
    read_samples,
    used_routes,
)
from pipeline.traces.recorded_sets import write_recorded_set
from pipeline.traces.replayed_sets import check_replay, expected_of
from pipeline.upkeep.verify import verify
from tests.hostile.case import FREE, HARMLESS, NAMED, Case
from tests.hostile.families.places import removed
from tests.hostile.known import may_be_silent, not_noticed
from tests.hostile.worlds import world
from tests.memory_store import MemoryStore

_SLICE = "slice"
"""The first word in the names of results that contain only some layers."""
Item = tuple[str, Any]
"""One result of a reader: a name such as 'routes 000000/1/0', and a plain value."""


@dataclass
class Verdict:
    """The results of one case."""

    wrong: list[str] = field(default_factory=list)
    """Readers and commands that accepted incorrect content or refused correct content."""
    tracebacks: list[str] = field(default_factory=list)
    """Readers and commands that raised an error other than TraceError and StoreError."""
    unnamed: bool = False
    """Whether `verify` reported no problem although it should have reported one."""
    refused: int = 0
    """The number of readers that refused the store."""
    problems: list[str] = field(default_factory=list)
    """The problems that `verify` reported."""
    memory_mb: float = 0.0
    """The peak growth of the process's memory."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """The child process's CPU time in seconds, including the time to build the case."""
    impossible: bool = False
    """Whether the case changes nothing."""
    hung: bool = False
    """Whether the case exceeded its time limit."""

    @property
    def bad(self) -> list[str]:
        """The failures of the case; empty if it passed."""
        found = [*self.wrong, *self.tracebacks]
        if self.unnamed:
            found.append("verify names nothing")
        if self.hung:
            found.append("hangs")
        return found


class Placed:
    """A world in a folder, to which cases are applied one after another."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.root = name, root / name / "store"
        for key, data in world(name).items():
            self._write(key, data)

    @contextmanager
    def damaged(self, changes: Mapping[str, Any]) -> Iterator[Store]:
        """Yield the store with these changes, and restore the world afterwards."""
        try:
            for key in changes:
                removed(self.root / key)
            for key, change in changes.items():
                path = self.root / key
                path.parent.mkdir(parents=True, exist_ok=True)
                if callable(change):
                    change(path)
                elif change is not None:
                    path.write_bytes(change)
            yield open_store(str(self.root))
        finally:
            self._restore(changes)

    def _restore(self, changes: Mapping[str, Any]) -> None:
        for key in changes:
            removed(self.root / key)
        for key in changes:
            for odd in ("other-link", "other-fifo"):
                removed((self.root / key).with_name(odd))
        for key in changes:
            if key in world(self.name):
                self._write(key, world(self.name)[key])

    def _write(self, key: str, data: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def judge(case: Case, placed: Placed, changes: Mapping[str, Any], turn: int | None) -> Verdict:
    """Try a case and return its verdict.

    Args:
        case: The case.
        placed: The case's world in a folder.
        changes: The changes that the case makes.
        turn: Selects one of the commands and one of the slow readers; None selects all of them.
    """
    verdict = Verdict()
    steps = {keys.folder_number(key) for key in changes if key.startswith("steps/")}
    only = all(key.startswith("steps/") for key in changes) and len(steps) == 1
    some = only and case.expect == NAMED
    step = next(iter(steps)) if some else None
    step = step if step in (0, 1) else None
    for command in _chosen(COMMANDS, turn):
        right_command(placed, command)
    with placed.damaged(changes) as store:
        try:
            report = verify(store, step)
            verdict.problems = [str(problem) for problem in report.problems]
        except Exception as error:  # noqa: BLE001 - the verdict reports unexpected errors
            verdict.tracebacks.append(f"verify: {_said(error)}")
        else:
            verdict.unnamed = case.expect == NAMED and not verdict.problems
            if case.expect == HARMLESS and verdict.problems:
                verdict.wrong.append(f"verify names a false problem: {verdict.problems[0][:300]}")
        blind = not_noticed(case)
        for number in steps & {0, 1} or {0}:
            _read(case, store, number or 0, verdict, turn, blind)
        for command in _chosen(COMMANDS, turn):
            _command(case, command, placed, verdict, blind)
    if may_be_silent(case):
        verdict.unnamed = False
    return verdict


def _read(
    case: Case, store: Store, step: int, verdict: Verdict, turn: int | None, blind: Any
) -> None:
    right = truth(case.world, step)
    for name, reader in {**READERS, **_chosen(SLOW_READERS, turn)}.items():
        if name not in right:
            continue  # the reader also refuses the undamaged step, perhaps because it has no routes
        found: dict[str, Any] = {}
        try:
            for item, value in reader(store, step, case.level):
                found[item] = value
        except (TraceError, StoreError):
            verdict.refused += 1
            if case.expect == HARMLESS:
                verdict.wrong.append(f"{name} refuses right content")
            continue
        except Exception as error:  # noqa: BLE001 - the verdict reports unexpected errors
            verdict.tracebacks.append(f"{name}: {_said(error)}")
            continue
        _compare(case, name, found, right[name], verdict, blind)


def _compare(
    case: Case,
    name: str,
    found: Mapping[str, Any],
    expected: Mapping[str, Any],
    verdict: Verdict,
    blind: Any,
) -> None:
    for item in sorted(set(found) | set(expected)):
        if case.level == "L1" and item.startswith(_SLICE):
            continue
        whole = item.startswith(("sample ", "routes "))
        if case.level == "L1" and case.expect != HARMLESS and (not whole or item not in found):
            continue  # readers accept the values of an L1 manifest; only verify compares them
        if name == "run" and item not in found:
            continue  # without run.json the store is a recorded set, which has only steps
        if blind is not None and not (item in found and item in expected):
            continue
        known = verdict.problems or case.expect == FREE
        if name == "run" and known and _is_less(found[item], expected[item]):
            continue  # a step without its seal or plan is unfinished; verify reports later objects
        if item not in found or item not in expected:
            unexpected = "not in the undamaged world" if item in found else "missing"
            verdict.wrong.append(f"{name}: {item} is {unexpected}")
            return
        if found[item] != expected[item]:
            where = differing(found[item], expected[item])
            if blind is not None and set(where) <= set(blind):
                continue
            verdict.wrong.append(f"{name}: {item} is wrong: {', '.join(where)}")
            return


def _is_less(found: Any, expected: Any) -> bool:
    lists = isinstance(found, list) and isinstance(expected, list)
    return lists and len(found) < len(expected) and all(one in expected for one in found)


def differing(found: Any, expected: Any) -> list[str]:
    """Return the names of the fields that differ; ['value'] for values without fields."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return [n for n in sorted({*found, *expected}) if found.get(n) != expected.get(n)]
    return ["value"]


def _said(error: BaseException) -> str:
    at = traceback.extract_tb(error.__traceback__)
    ours = [
        frame for frame in at if "/pipeline/" in frame.filename or "/retrace/" in frame.filename
    ]
    place = ours[-1] if ours else at[-1]
    where = f"{Path(place.filename).name}:{place.lineno}"
    return f"{type(error).__name__} at {where}: {str(error)[:160]}"


# Readers


def vars_of(sample: Sample) -> dict[str, Any]:
    """Return the fields of a sample as plain values, in which NaN equals NaN."""
    values = {n: v for n, v in vars(sample).items() if n not in ("routes", "tokenizer")}
    found = {k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in values.items()}
    found["extras"] = json.dumps(found["extras"], sort_keys=True)
    return {k: repr(v) if isinstance(v, float) else v for k, v in found.items()}


def lists_of(routes: Routes) -> tuple[Any, ...]:
    """Return routes as plain values."""
    return routes.sets_TLK.shape, routes.sets_TLK.tobytes(), routes.valid_T.tolist()


def _samples(store: Store, step: int, _level: str) -> Iterator[Item]:
    manifest = read_manifest(store, step)
    for sample in read_samples(store, manifest, manifest.ids):
        yield f"sample {sample.id}", vars_of(sample)


def _manifest(store: Store, step: int, _level: str) -> Iterator[Item]:
    sealed = open_manifest(store, step)
    yield "samples", sealed.samples
    yield "columns", sealed.columns(["id", "group", "reward", "rows_total"]).to_pylist()
    manifest = read_manifest(store, step)
    yield "rows", manifest.rows.to_pylist()
    yield "head", (manifest.geometry, manifest.provenance, manifest.policy_versions)
    share = sealed.select(range(sealed.samples - 1, -1, -2))
    yield "share", share.ids


def _used(store: Store, step: int, _level: str) -> Iterator[Item]:
    used = used_routes(store, step)
    for id, routes in read_routes(store, used, used.ids).items():
        yield f"routes {id}", lists_of(routes)


def _slices(store: Store, step: int, level: str) -> Iterator[Item]:
    """Yield all layers in descending order and, at L0, the last layer of some samples.

    At L1, a slice with only some layers does not reveal every change.
    """
    used = used_routes(store, step)
    layers = used.geometry.layers if used.geometry else ()
    for id, routes in read_routes(store, used, used.ids, layers[::-1]).items():
        yield f"routes {id}, last layer first", lists_of(routes)
    if level == "L0":
        for id, routes in read_routes(store, used, used.ids[1:3], layers[-1:]).items():
            yield f"{_SLICE} {id}", lists_of(routes)


def _early(store: Store, step: int, _level: str) -> Iterator[Item]:
    """Yield each shard as if it were read before the seal, after comparing it with the seal."""
    numbers = itertools.takewhile(
        lambda shard: store.size(keys.rollout(step, shard)) is not None, itertools.count()
    )
    shards = [open_shard(store, step, shard) for shard in numbers]
    sealed = read_manifest(store, step)
    ids = [(shard, check_shard(sealed, shard)) for shard in shards]
    if sorted(itertools.chain(*(mine for _, mine in ids))) != sorted(sealed.ids):
        raise TraceError(f"step {step}: its shards have different samples")
    for shard, mine in ids:
        for sample in read_samples(store, shard, mine):
            yield f"sample {sample.id}", vars_of(sample)
        if shard.geometry is not None:
            for id, routes in read_routes(store, shard, mine).items():
                yield f"routes {id}", lists_of(routes)


def _streams(store: Store, step: int, _level: str) -> Iterator[Item]:
    sealed = open_manifest(store, step)
    # Select all rows, because the first row of an L1 manifest with moved rows belongs to a
    # different sample. The limit is for manifests that claim billions of rows.
    share = sealed.select(range(min(sealed.samples, 64)))
    used = used_routes(store, step)
    with closing(SampleStream(store, share)) as samples:
        for id in share.ids:
            yield f"sample {id}", vars_of(samples[id])
    if used.geometry is not None:
        with closing(RouteStream(store, used, used.geometry.layers)) as routes:
            for id in used.ids:
                yield f"routes {id}", lists_of(routes[id])


def _library(store: Store, step: int, _level: str) -> Iterator[Item]:
    opened = retrace.open_run(store.uri).step(step)
    yield "table", opened.table().to_pylist()
    for sample in opened.samples():
        yield f"sample {sample.id}", vars_of(sample)
        if sample.routes is not None:
            yield f"routes {sample.id}", lists_of(sample.routes)


def _recorded(store: Store, step: int, _level: str) -> Iterator[Item]:
    target = MemoryStore()
    write_recorded_set(store, target, step)
    used = used_routes(target, step)
    for id, routes in read_routes(target, used, used.ids).items():
        yield f"routes {id}", lists_of(routes)


def _replay(store: Store, step: int, _level: str) -> Iterator[Item]:
    manifest = check_replay(store, step, expected_of(store, step, None))
    yield "ids", manifest.ids


def _run(store: Store, _step: int, _level: str) -> Iterator[Item]:
    """Yield the run's steps and its other content: metrics, policies, validations."""
    run = retrace.open_run(store.uri)
    yield "steps", run.steps()
    if not run.recorded_set:
        yield "metrics", run.metrics().to_pylist()
        yield "policies", run.policies()
        yield "validations", run.validations()


Reader = Callable[[Store, int, str], Iterator[Item]]
READERS: dict[str, Reader] = {
    "read_manifest": _manifest,
    "read_samples": _samples,
    "used_routes": _used,
    "slices": _slices,
}
SLOW_READERS: dict[str, Reader] = {
    "early": _early,
    "streams": _streams,
    "retrace": _library,
    "write_recorded_set": _recorded,
    "check_replay": _replay,
    "run": _run,
}
"""Slow readers. In a sample, each case is tried with only one; in the full campaign, with all."""


def _chosen(of: dict[str, Any], turn: int | None) -> dict[str, Any]:
    names = list(of) if turn is None else [list(of)[turn % len(of)]]
    return {name: of[name] for name in names}


@cache
def truth(name: str, step: int) -> dict[str, dict[str, Any]]:
    """Return each reader's results for the undamaged world, keyed by reader and item.

    Readers that refuse the world are left out.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        for key, data in world(name).items():
            store.create(key, data)
        assert not verify(store).problems, (name, verify(store).problems)
        for reader, read in {**READERS, **SLOW_READERS}.items():
            try:
                found[reader] = dict(read(store, step, "L0"))
            except (TraceError, StoreError):
                continue
    return found


# Commands

COMMANDS: dict[str, list[str]] = {
    "ls": ["ls", "STORE"],
    "ls --step": ["ls", "STORE", "--step", "0"],
    "show": ["show", "STORE", "000000/0/1"],
    "verify": ["verify", "STORE"],
    "stats": ["stats", "STORE"],
    "export": ["export", "STORE", "--out", "OUT"],
    "export pt": ["export", "STORE", "--out", "OUT", "--format", "slime", "--step", "0"],
}
_CONTROL = {chr(c) for c in (*range(32), 127, *range(0x80, 0xA0))} - {"\n"}


def _run_command(arguments: list[str], root: Path) -> tuple[int, str, BaseException | None, Any]:
    with tempfile.TemporaryDirectory() as out:
        folder = Path(out, "out")
        places = {"STORE": str(root), "OUT": str(folder)}
        result = CliRunner().invoke(app, [places.get(a, a) for a in arguments])
        files = {}
        if arguments[0] == "export" and "--format" not in arguments:
            files = {
                path.relative_to(folder).as_posix(): path.read_bytes()
                for path in sorted(folder.rglob("*"))
                if path.is_file()
            }
        error = result.exception
        if isinstance(error, SystemExit):
            error = None
        text = result.output.replace(str(folder), "OUT").replace(root.as_uri(), "STORE")
        return result.exit_code, text.replace(str(root), "STORE"), error, files


def _command(case: Case, command: str, placed: Placed, verdict: Verdict, blind: Any) -> None:
    arguments = COMMANDS[command]
    code, text, error, files = _run_command(arguments, placed.root)
    name = f"traces {command}"
    if error is not None:
        verdict.tracebacks.append(f"{name}: {_said(error)}")
    elif code not in (0, 1, 2) or not text.strip():
        verdict.wrong.append(f"{name}: exit code {code}, printed {text[:100]!r}")
    if _CONTROL & set(text):
        verdict.wrong.append(f"{name}: control characters reach the terminal")
    if "Traceback" in text:
        verdict.tracebacks.append(f"{name}: prints a traceback")
    right_code, right_text, right_files = right_command(placed, command)
    if command == "verify":
        if case.expect == NAMED and code == 0 and blind is None and not verdict.unnamed:
            verdict.wrong.append(f"{name}: exit code 0, but verify() names a problem")
        return
    if code != 0 or error is not None or blind is not None:
        if case.expect == HARMLESS and code != right_code:
            verdict.wrong.append(f"{name}: exit code {code} for right content")
        return
    if right_code == 0 and files != right_files:
        changed = sorted(n for n in {*files, *right_files} if files.get(n) != right_files.get(n))
        changed = [n for n in changed if case.level == "L0" or (n in files and n.endswith(".npy"))]
        if changed:
            verdict.wrong.append(f"{name}: exit code 0, but wrong arrays: {changed[:3]}")
    if case.level == "L0" and ":run.json/" not in case.name and text != right_text:
        verdict.wrong.append(f"{name}: exit code 0, but a different text")


@cache
def right_command(placed: Placed, command: str) -> tuple[int, str, Any]:
    """Return a command's exit code, text and files for the world, which must still be undamaged."""
    code, text, _, files = _run_command(COMMANDS[command], placed.root)
    return code, text, files
