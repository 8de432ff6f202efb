"""Accidents to the objects of a run: a changed byte, a lost end, a lost object, exchanged objects.

After each accident, `verify` names the object, and readers that need it name it too or return the
values that were written.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.policies.versions import publish_policy
from pipeline.run import keys
from pipeline.run.commit import files_in, read_commit
from pipeline.store import Store, StoreError
from pipeline.traces import (
    Sample,
    TraceError,
    read_manifest,
    read_routes,
    read_sample_file,
    read_samples,
    used_routes,
)
from pipeline.traces.format import parquet
from pipeline.traces.write import rows
from pipeline.upkeep.verify import verify
from tests.exhaustive import sample_or_all
from tests.stored_runs import whole_run, write_checkpoint, write_step

FREE = re.compile(
    r"attempts/000\.json|checkpoints/\d+/checkpoint\.json|validations/\d+/\d{5}\.json"
    r"|policies/000001/policy\.json|steps/000001/metrics\.json"
)
"""Commits that may be missing: a writer may have been killed before it wrote them, and a trainer
removes all policies but the newest."""


class Accidents:
    """A run with two steps in which one accident at a time happens.

    Args:
        store: An empty store.
        scratch: A folder for temporary files.
        mode: The routes of the steps: "R3", or "R2", in which step 1 also has those of the engine.
    """

    def __init__(self, store: Store, scratch: Path, mode: str) -> None:
        self.store = store
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rows, "ROUTES_ROWS", 10)  # several row groups
            whole_run(store, scratch, mode)
            write_step(store, 1, mode)
        publish_policy(store, 2, scratch / "weights")
        write_checkpoint(store, 2)
        self.objects = {info.key: store.read(info.key) for info in store.list("")}
        self._values = {key: read(store) for key in self.objects for read in readers(key)}
        assert not verify(store).problems

    @contextmanager
    def happen(self, changes: dict[str, bytes | None]) -> Iterator[None]:
        """Replace objects for the duration of the block; None removes one."""
        try:
            for key, data in changes.items():
                self._put(key, data)
            yield
        finally:
            for key in changes:
                self._put(key, self.objects[key])

    def _put(self, key: str, data: bytes | None) -> None:
        self.store.delete(key)
        if data is not None:
            self.store.create(key, data)

    def check(self, changes: dict[str, bytes | None], whole: bool) -> None:
        """Check what readers and `verify` say about changed objects.

        Args:
            changes: The new content of objects.
            whole: Whether readers fetch files whole, as small ones, or only the ranges they need.
        """
        with pytest.MonkeyPatch.context() as patch, self.happen(changes):
            if not whole:
                patch.setattr(parquet, "_SMALL", -1)
            for key in changes:
                # A commit that is read alone, without its place, may be another one.
                for read in readers(key) if len(changes) == 1 or key.startswith("steps/") else ():
                    found = outcome(read, self.store)
                    named = isinstance(found, Exception) and any(k in str(found) for k in changes)
                    assert named or found == self._values[key], (key, found)
            problems = [str(problem) for problem in verify(self.store).problems]
            for key, data in changes.items():
                if not self._is_same(key, data) and not (data is None and FREE.fullmatch(key)):
                    assert any(key in problem for problem in problems), (key, problems)

    def _is_same(self, key: str, data: bytes | None) -> bool:
        """Return whether an object has the same content; JSON may have other spaces."""
        if data == self.objects[key]:
            return True
        if data is None or not is_commit(key):
            return False
        try:
            return bool(json.loads(data) == json.loads(self.objects[key]))
        except ValueError:
            return False


def outcome(read: Callable[[Store], Any], store: Store) -> Any:
    """Return what a reader returns, or the error that it raises for unreadable objects."""
    try:
        return read(store)
    except (StoreError, TraceError) as error:
        return error


def readers(key: str) -> Iterator[Callable[[Store], Any]]:
    """Yield the functions that read an object of a run, alone or with others."""
    step = keys.folder_number(key) if key.startswith(keys.steps()) else None
    if step is not None:
        yield lambda store: step_values(store, step)
    elif re.fullmatch(r"validations/\d+/\d{5}\..*", key):
        yield lambda store: validation_values(store, key.partition(".")[0] + ".json")
    elif is_commit(key):
        yield lambda store: read_commit(store, key)


def is_commit(key: str) -> bool:
    """Return whether a key names a commit, and not a data file in JSON."""
    return key.endswith(".json") and not key.startswith(keys.inputs()) and not keys.maker_of(key)


def step_values(store: Store, step: int) -> list[Any]:
    """Return everything that the readers of a step return."""
    found: list[Any] = []
    for manifest in (read_manifest(store, step), used_routes(store, step)):
        found.append((replace(manifest, rows=None), manifest.rows.to_pylist()))
        found += map(sample_values, read_samples(store, manifest, manifest.ids))
        if manifest.geometry is not None:
            for routes in read_routes(store, manifest, manifest.ids).values():
                found.append((routes.sets_TLK.tolist(), routes.valid_T.tolist()))
    return found


def validation_values(store: Store, commit: str) -> list[Any]:
    (file,) = files_in(read_commit(store, commit))
    return [sample_values(sample) for sample in read_sample_file(store, file)]


def sample_values(sample: Sample) -> dict[str, Any]:
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in vars(sample).items()
    }


def kind_of(key: str) -> str:
    """Return what is the same in the keys of all objects of a kind."""
    return re.sub(r"[0-9a-f]{8,}|\d+", "#", key)


def check_changed_bytes(store: Store, scratch: Path, mode: str, sample: int = 40) -> None:
    """Change any byte of any object; see `Accidents` for the arguments.

    `sample` is the number of examples in `make test`.
    """
    run = Accidents(store, scratch, mode)

    @settings(max_examples=sample_or_all(sample, 2_000))
    @given(st.data(), st.sampled_from(sorted(run.objects)), st.integers(1, 255), st.booleans())
    def check(data: st.DataObject, key: str, bits: int, whole: bool) -> None:
        content = bytearray(run.objects[key])
        content[data.draw(st.integers(0, len(content) - 1))] ^= bits
        run.check({key: bytes(content)}, whole)

    check()


def check_lost_objects(store: Store, scratch: Path, mode: str, sample: int = 40) -> None:
    """Cut off, remove or exchange any object; see `Accidents` for the arguments."""
    run = Accidents(store, scratch, mode)

    @settings(max_examples=sample_or_all(sample, 1_000))
    @given(st.data(), st.sampled_from(sorted(run.objects)), st.booleans())
    def check(data: st.DataObject, key: str, whole: bool) -> None:
        content = run.objects[key]
        others = [other for other in run.objects if kind_of(other) == kind_of(key) != other]
        accident = data.draw(st.sampled_from(["cut", "lost", *["exchanged"] * bool(others)]))
        if accident == "exchanged":
            other = data.draw(st.sampled_from(others))
            run.check({key: run.objects[other], other: content}, whole)
        elif accident == "cut":
            run.check({key: content[: data.draw(st.integers(0, len(content) - 1))]}, whole)
        else:
            run.check({key: None}, whole)

    check()
