"""A second reader, written only from docs/trace-format.md, reads the project's files."""

import ast
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.run.commit import new_write_id
from pipeline.store import Store, open_store
from pipeline.traces import (
    Compression,
    Geometry,
    Routes,
    Sample,
    seal,
    write_recorded_set,
    write_shard,
)
from pipeline.traces.format.codec import PLANES
from pipeline.traces.write import segments
from pipeline.traces.write.routes_file import RoutesFile
from pipeline.traces.write.segments import ROW_GROUP_TOKENS
from tests.samples import R3, make_samples, random_sets, sealed_r2, sealed_r3

READER = Path(__file__).with_name("independent_reader.py")

PROGRAM = """
import os, runpy, sys
from pathlib import Path
import numpy as np
found = runpy.run_path(sys.argv[1])["read_step"](Path(sys.argv[2]), 0)
assert not [name for name in sys.modules if name.split(".")[0] in ("pipeline", "operators")]
np.savez(sys.argv[3], **{f"{id} {part}": array for id, pair in found.items()
                         for part, array in zip(("tokens", "routes"), pair)})
os._exit(0)
"""
"""The program skips the interpreter's normal exit, during which Arrow's threads sometimes abort on
a busy machine."""


def read_apart(root: Path) -> subprocess.CompletedProcess[str]:
    """Run the reader in a separate process, isolated from this project's folder and environment."""
    command = [sys.executable, "-I", "-c", PROGRAM, READER, root, root / "found.npz"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def assert_reads(root: Path, samples: Sequence[Sample]) -> None:
    done = read_apart(root)
    assert done.returncode == 0, done.stderr
    found = np.load(root / "found.npz")
    assert len(found.files) == 2 * len(samples)
    for sample in samples:
        assert np.array_equal(found[f"{sample.id} tokens"], sample.tokens_S)
        if sample.routes is not None:
            sets_TLK = sample.routes.sets_TLK.astype(int)
            sets_TLK[~sample.routes.valid_T] = -1
            assert np.array_equal(found[f"{sample.id} routes"], sets_TLK.swapaxes(0, 1))


def test_the_reader_is_short_and_imports_nothing_of_the_project():
    text = READER.read_text()
    assert len(text.splitlines()) < 190
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported <= {*sys.stdlib_module_names, "numpy", "pyarrow"}


def test_it_reads_routes_of_the_engine(tmp_path):
    """There are two shards, with shared prompts and with rows that are not valid."""
    samples = make_samples(prompts=5, n=3)
    sealed_r3(open_store(str(tmp_path)), samples)
    assert_reads(tmp_path, samples)


def test_it_reads_routes_of_the_trainer(tmp_path):
    """In R2, the reader joins two stages and two data-parallel ranks by segment owner."""
    samples = make_samples()
    sealed_r2(open_store(str(tmp_path)), samples)
    assert_reads(tmp_path, samples)


def test_it_reads_samples_without_routes(tmp_path):
    samples = [replace(sample, routes=None) for sample in make_samples()]
    seal_one(open_store(str(tmp_path)), samples, None)
    assert_reads(tmp_path, samples)


@pytest.mark.parametrize("compression", ["zstd", "none"])
@pytest.mark.parametrize("experts", [256, 257, 65_536])
def test_it_reads_all_codings(tmp_path, experts, compression):
    geometry = Geometry(experts, 10, (3, 40))
    samples = make_samples(geometry=geometry)
    seal_one(open_store(str(tmp_path)), samples, geometry, compression)
    assert_reads(tmp_path, samples)


@pytest.mark.parametrize("stored", PLANES.values())
@pytest.mark.parametrize("experts", [256, 257])
def test_it_reads_planes(tmp_path, monkeypatch, experts, stored):
    """A file has several row groups, and a row group several segments."""
    monkeypatch.setattr(RoutesFile, "_choose_coding", lambda *_: stored)
    monkeypatch.setattr(segments, "ROW_GROUP_TOKENS", 40)
    geometry = Geometry(experts, 10, (3, 40))
    samples = make_samples(geometry=geometry)
    seal_one(open_store(str(tmp_path)), samples, geometry)
    assert_reads(tmp_path, samples)


@pytest.mark.parametrize("seal_run", [sealed_r3, sealed_r2])
def test_it_reads_a_recorded_set(tmp_path, seal_run):
    samples = make_samples()
    run, target = (open_store(str(tmp_path / name)) for name in ("run", "set"))
    seal_run(run, samples)
    write_recorded_set(run, target, 0)
    assert_reads(tmp_path / "set", samples)


def test_it_reads_a_sample_in_several_segments_that_differs_from_its_group(tmp_path):
    """The prompt is longer than one row group. From the middle of the prompt on, one sample's
    routes differ from those of the other samples."""
    geometry, rng = Geometry(8, 2, (1,)), np.random.default_rng(0)
    P = 2 * ROW_GROUP_TOKENS + 100
    first, second, third = make_samples(prompts=1, n=3, geometry=geometry, known=1.0)
    prompt_P = rng.integers(0, 100, P).astype(np.uint32)
    prompt_sets = random_sets(rng, P, geometry)
    samples = []
    for sample in (first, second, third):
        G = len(sample.response_tokens_G)
        sets = np.concatenate([prompt_sets, random_sets(rng, G - 1, geometry)])
        if sample is second:
            sets[ROW_GROUP_TOKENS + 7] = (sets[ROW_GROUP_TOKENS + 7, :, ::-1] + 1) % 8
            sets.sort(axis=-1)
        routes = Routes(sets, np.ones(len(sets), bool))
        samples.append(replace(sample, prompt_tokens_P=prompt_P, routes=routes))
    seal_one(open_store(str(tmp_path)), samples, geometry)
    assert_reads(tmp_path, samples)


@pytest.mark.parametrize(
    "suffix", ["manifest.json", ".json", ".samples.parquet", ".routes.parquet"]
)
def test_it_refuses_changed_files(tmp_path, suffix):
    sealed_r3(open_store(str(tmp_path)), make_samples())
    path = next(path for path in sorted(tmp_path.rglob("*")) if path.name.endswith(suffix))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    done = read_apart(tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        ("AssertionError", "json", "Unicode", "KeyError")
    )


def seal_one(
    store: Store,
    samples: Sequence[Sample],
    geometry: Geometry | None,
    compression: Compression = "zstd",
) -> None:
    """Seal a step that consists of one shard."""
    made_by = R3 if geometry else None
    new = new_write_id()
    write_shard(store, 0, 0, new, samples, geometry, made_by, compression=compression)
    seal(store, 0, 1, lambda _: [sample.id for sample in samples], 0)
