"""Undamaged stores, and their twins: other runs with the same ids and lengths."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np

from pipeline.store import Store
from pipeline.traces import Geometry, Routes, Sample, VersionSpan
from pipeline.traces.recorded_sets import write_recorded_set
from pipeline.traces.write.library import write_step
from tests.hostile import newer
from tests.memory_store import MemoryStore
from tests.old_stores import old_objects
from tests.policies import write_chain
from tests.samples import GEOMETRY, R3, make_samples, random_sets, write_run
from tests.stored_runs import SAMPLES, whole_run
from tests.stored_runs import write_step as run_step

Objects = Mapping[str, bytes]

WIDE = Geometry(300, 5, (0, 3))
"""A geometry with more than 256 experts, so that each id takes two bytes."""


@contextmanager
def _small_and_repeatable() -> Iterator[None]:
    """Give small files several row groups. Number the write ids, so that names stay the same."""
    numbers = itertools.count(1)
    with ExitStack() as patches:
        for name in ("segments", "rows"):
            patches.enter_context(patch(f"pipeline.traces.write.{name}.ROW_GROUP_TOKENS", 16))
        patches.enter_context(patch("pipeline.traces.write.seal.ROW_GROUP_SAMPLES", 2))
        hexadecimal = lambda size: f"{next(numbers):0{2 * size}x}"  # noqa: E731
        patches.enter_context(patch("secrets.token_hex", hexadecimal))
        yield


def redrawn(samples: Sequence[Sample], tokens: bool, geometry: Geometry = GEOMETRY) -> list[Sample]:
    """Return the samples of another run, with the same ids, lengths and validity.

    Args:
        samples: The samples of the first run.
        tokens: Whether tokens, log-probs and loss masks also differ, not only routes and rewards.
        geometry: The geometry of the routes.
    """
    rng = np.random.default_rng(99)
    found = []
    for sample in samples:
        valid_T = sample.routes.valid_T if sample.routes else np.empty(0, np.bool_)
        routes = Routes(random_sets(rng, len(valid_T), geometry), valid_T)
        reward = None if sample.reward is None else sample.reward / 2
        other = replace(sample, routes=routes, reward=reward)
        if tokens:
            P, G = len(sample.prompt_tokens_P), len(sample.response_tokens_G)
            other = replace(
                other,
                prompt_tokens_P=sample.prompt_tokens_P + np.uint32(rng.integers(100, 200)),
                response_tokens_G=rng.integers(100, 200, G).astype(np.uint32),
                logprobs_G=-rng.random(G).astype(np.float32),
                loss_mask_G=~sample.loss_mask_G,
                reward=None if reward is None else 1 + float(rng.random()) + P,
                finish_reason="length",
                extras={"format": 99},
            )
        found.append(other if sample.routes else replace(other, routes=None))
    return found


def _run(mode: str, change: Callable[[Sequence[Sample]], Sequence[Sample]] = list) -> Objects:
    """Return a run with two steps in `mode`; the second step also has the engine's routes."""
    store = MemoryStore()
    with TemporaryDirectory() as scratch, patch("tests.stored_runs.SAMPLES", change(SAMPLES)):
        whole_run(store, Path(scratch), mode)
    real = make_samples
    with patch("tests.stored_runs.make_samples", lambda **of: change(real(**of))):
        run_step(store, 1, mode)
    return store.objects


def _varied(geometry: Geometry) -> list[Sample]:
    """Return samples as a library user writes them.

    Some are masked, aborted, from several policy versions, or only one token long.
    """
    samples = make_samples(prompts=4, geometry=geometry, seed=3)
    G = len(samples[0].response_tokens_G)
    spans = (VersionSpan(0, 0, G - 1), VersionSpan(1, G - 1, G))
    samples[0] = replace(samples[0], version_spans=spans)
    samples[1] = replace(samples[1], reward=None, reward_error="it raised")
    samples[2] = replace(samples[2], finish_reason="abort", seed=-1)
    routes = Routes(random_sets(np.random.default_rng(0), 0, geometry), np.empty(0, np.bool_))
    one = samples[6]
    samples[6:] = [
        replace(
            one,
            prompt_tokens_P=one.prompt_tokens_P[:1],
            response_tokens_G=one.response_tokens_G[:0],
            loss_mask_G=one.loss_mask_G[:0],
            logprobs_G=one.logprobs_G[:0],
            version_spans=(VersionSpan(0, 0, 0),),
            routes=routes,
        )
    ]
    return samples


def _library(
    geometry: Geometry, change: Callable[[Sequence[Sample]], Sequence[Sample]] = list
) -> Objects:
    store: Store = MemoryStore()
    write_step(store, 0, change(_varied(geometry)), geometry, R3)
    return store.objects


def _planes(change: Callable[[Sequence[Sample]], Sequence[Sample]] = list) -> Objects:
    """Return the library's step with its row groups coded as planes, as large files may be."""
    with patch("pipeline.traces.write.routes_file.RoutesFile._choose_coding") as chosen:
        chosen.return_value = "gaps-planes"
        return _library(GEOMETRY, change)


def _recorded(run: Objects) -> Objects:
    target = MemoryStore()
    write_recorded_set(MemoryStore(run), target, 0)
    return target.objects


def _policies() -> Objects:
    """Return a run before its first step, with a whole policy version and two differences."""
    store = MemoryStore()
    write_run(store, SAMPLES, "R3", b"{}")
    write_chain(store, 3, 3)
    return store.objects


def _old(name: str) -> Objects:
    """Return a store in format 1.0 without its policies, which have no real weights."""
    return {k: data for k, data in old_objects(name).items() if not k.startswith("policies/")}


_MADE: dict[str, Callable[[], Objects]] = {
    "r3": lambda: _run("R3"),
    "r2": lambda: _run("R2"),
    "set": lambda: _library(GEOMETRY),
    "wide": lambda: _library(WIDE),
    "planes": _planes,
    "r2set": lambda: _recorded(world("r2")),
    "filtered": lambda: newer.filtered("R3"),
    "filteredset": lambda: _recorded(newer.filtered("R2")),
    "branched": newer.branched,
    "cut": newer.cut,
    "policies": _policies,
    "r3-1.0": lambda: _old("r3"),
    "r2-1.0": lambda: _old("r2"),
    "audited-1.0": lambda: _old("audited"),
    "replayed-1.0": lambda: _old("replayed"),
}
WORLDS = tuple(_MADE)
NEWER = ("filtered", "filteredset", "branched", "cut")
"""The worlds that use the additions of format 1.1."""
WITH_REJECTED = ("filtered", "filteredset")
"""The worlds in which all samples of shards 1 and 3 are rejected."""

_TWINS: dict[tuple[str, bool], Callable[[], Objects]] = {
    (name, tokens): make
    for tokens in (False, True)
    for name, make in {
        "r3": lambda tokens=tokens: _run("R3", lambda s: redrawn(s, tokens)),
        "r2": lambda tokens=tokens: _run("R2", lambda s: redrawn(s, tokens)),
        "set": lambda tokens=tokens: _library(GEOMETRY, lambda s: redrawn(s, tokens)),
        "planes": lambda tokens=tokens: _planes(lambda s: redrawn(s, tokens)),
        "filtered": lambda tokens=tokens: newer.filtered("R3", lambda s: redrawn(s, tokens)),
        "branched": lambda tokens=tokens: newer.branched(lambda s: redrawn(s, tokens)),
        "cut": lambda tokens=tokens: newer.cut(lambda s: redrawn(s, tokens)),
    }.items()
}
WITH_TWINS = frozenset(name for name, _ in _TWINS)


@cache
def world(name: str) -> Objects:
    """Return the objects of the undamaged store with this name in WORLDS."""
    with _small_and_repeatable():
        return dict(_MADE[name]())


@cache
def twin(name: str, tokens: bool) -> Objects:
    """Return another run with the same keys, sample ids and lengths as the world.

    Its routes and rewards differ; if `tokens` is true, its tokens also differ.
    """
    with _small_and_repeatable():
        return dict(_TWINS[name, tokens]())
