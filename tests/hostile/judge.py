"""What readers, `verify` and the commands make of a case, and whether that is right."""

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
    open_manifest,
    read_manifest,
    read_routes,
    read_samples,
    used_routes,
)
from pipeline.traces.recorded_sets import check_replay, expected_of, write_recorded_set
from pipeline.upkeep.verify import verify
from tests.hostile.case import FREE, HARMLESS, NAMED, Case
from tests.hostile.families.places import removed
from tests.hostile.known import may_be_silent, not_noticed
from tests.hostile.worlds import world
from tests.memory_store import MemoryStore

Item = tuple[str, Any]
"""What a reader returns: a name such as 'routes of 000000/1/0', and a plain value."""


@dataclass
class Verdict:
    """What a case came to."""

    wrong: list[str] = field(default_factory=list)
    """Readers and commands that took it for the truth, or refused what is right."""
    tracebacks: list[str] = field(default_factory=list)
    """What ended with another error than TraceError or StoreError."""
    unnamed: bool = False
    """`verify` named nothing."""
    refused: int = 0
    """Readers that refused."""
    problems: list[str] = field(default_factory=list)
    """What `verify` said."""
    memory_mb: float = 0.0
    """How much the process grew at its peak."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Of the judged process, the building of the case included."""
    impossible: bool = False
    """The case changes nothing."""
    hung: bool = False

    @property
    def bad(self) -> list[str]:
        """What is not as it must be; empty: all is well."""
        found = [*self.wrong, *self.tracebacks]
        if self.unnamed:
            found.append("verify names nothing")
        if self.hung:
            found.append("hangs")
        return found


class Placed:
    """A world in a folder, in which one case after the other is tried."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.root = name, root / name / "store"
        for key, data in world(name).items():
            self._write(key, data)

    @contextmanager
    def damaged(self, changes: Mapping[str, Any]) -> Iterator[Store]:
        """The store with these changes."""
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
    """Try a case. `turn` chooses one of the commands and slow readers; None: all of them."""
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
        except Exception as error:  # noqa: BLE001 - what else may come out is what is asked
            verdict.tracebacks.append(f"verify: {_said(error)}")
        else:
            verdict.unnamed = case.expect == NAMED and not verdict.problems
            if case.expect == HARMLESS and verdict.problems:
                verdict.wrong.append(f"verify names what is right: {verdict.problems[0][:300]}")
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
            continue  # it refuses the undamaged step, too: one without routes
        found: dict[str, Any] = {}
        try:
            for item, value in reader(store, step, case.level):
                found[item] = value
        except (TraceError, StoreError):
            verdict.refused += 1
            if case.expect == HARMLESS:
                verdict.wrong.append(f"{name} refuses what is right")
            continue
        except Exception as error:  # noqa: BLE001 - as above
            verdict.tracebacks.append(f"{name}: {_said(error)}")
            continue
        if name != "slices" or case.level == "L0":
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
        whole = item.startswith(("sample ", "routes "))
        if case.level == "L1" and case.expect != HARMLESS and (not whole or item not in found):
            continue  # a manifest says what it says; verify compares it
        if name == "run" and item not in found:
            continue  # without run.json it is a recorded set, which has steps alone
        if blind is not None and not (item in found and item in expected):
            continue
        known = verdict.problems or case.expect == FREE
        if name == "run" and known and _is_less(found[item], expected[item]):
            continue  # without a seal or plan it is not finished; verify names what came after it
        if item not in found or item not in expected:
            verdict.wrong.append(f"{name}: {item} is {'there' if item in found else 'missing'}")
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
    """The fields that differ."""
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
    """The fields of a sample as plain values, in which NaN equals NaN."""
    values = {n: v for n, v in vars(sample).items() if n not in ("routes", "tokenizer")}
    found = {k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in values.items()}
    found["extras"] = json.dumps(found["extras"], sort_keys=True)
    return {k: repr(v) if isinstance(v, float) else v for k, v in found.items()}


def lists_of(routes: Routes) -> tuple[Any, ...]:
    """Routes as plain values."""
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
    """Layers of samples; of files whose digests were remade a slice cannot notice all."""
    if level == "L1":
        return
    used = used_routes(store, step)
    layers = used.geometry.layers if used.geometry else ()
    for ids, some in ((used.ids, layers[::-1]), (used.ids[1:3], layers[-1:])):
        for id, routes in read_routes(store, used, ids, some).items():
            yield f"slice {len(some)} {id}", lists_of(routes)


def _streams(store: Store, step: int, _level: str) -> Iterator[Item]:
    sealed = open_manifest(store, step)
    # All rows: in an L1 manifest whose rows were moved, the first is another sample's. A manifest
    # may claim billions.
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
    """What a run has beside steps."""
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
    "streams": _streams,
    "retrace": _library,
    "write_recorded_set": _recorded,
    "check_replay": _replay,
    "run": _run,
}
"""Of these one is tried a case in a sample, and all in the whole."""


def _chosen(of: dict[str, Any], turn: int | None) -> dict[str, Any]:
    names = list(of) if turn is None else [list(of)[turn % len(of)]]
    return {name: of[name] for name in names}


@cache
def truth(name: str, step: int) -> dict[str, dict[str, Any]]:
    """By reader what it returns of the undamaged world; without readers that refuse it."""
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
        verdict.wrong.append(f"{name}: exit code {code}, said {text[:100]!r}")
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
            verdict.wrong.append(f"{name}: exit code {code} for what is right")
        return
    if right_code == 0 and files != right_files:
        changed = sorted(n for n in {*files, *right_files} if files.get(n) != right_files.get(n))
        changed = [n for n in changed if case.level == "L0" or (n in files and n.endswith(".npy"))]
        if changed:
            verdict.wrong.append(f"{name}: exit code 0 and other arrays: {changed[:3]}")
    if case.level == "L0" and ":run.json/" not in case.name and text != right_text:
        verdict.wrong.append(f"{name}: exit code 0 and another text")


@cache
def right_command(placed: Placed, command: str) -> tuple[int, str, Any]:
    """What a command says of the undamaged world, which lies there now."""
    code, text, _, files = _run_command(COMMANDS[command], placed.root)
    return code, text, files
