"""The project reads the files of a second writer, which follows only docs/trace-format.md."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.store import open_store
from pipeline.traces import (
    Geometry,
    Routes,
    Sample,
    TraceError,
    read_manifest,
    read_routes,
    read_samples,
    write_recorded_set,
)
from pipeline.upkeep.verify import verify
from tests.samples import equal, make_samples
from tests.unit.traces.format.independent_writer import write_step
from tests.unit.traces.format.test_independent_reader import assert_reads

PROGRAM = """
import runpy, sys
import independent_writer
assert not [name for name in sys.modules if name.split(".")[0] in ("pipeline", "operators")]
"""


def branch_of(first: Sample, geometry: Geometry) -> Sample:
    """Return a branch that differs from its first sequence in the last two tokens."""
    sets_TLK, tokens_G = first.routes.sets_TLK.copy(), first.response_tokens_G.copy()
    sets_TLK[-2:] = np.arange(geometry.topk, dtype=geometry.dtype) + 1
    tokens_G[-2:] += 1
    routes = Routes(sets_TLK, first.routes.valid_T)
    place = {"id": f"{first.id}.1", "branch_of": first.id, "reward": 0.25}
    return replace(first, response_tokens_G=tokens_G, routes=routes, **place)


def write_as_a_stranger(root: Path, geometry: Geometry) -> list:
    samples = make_samples(geometry=geometry)
    first = max(samples[:-1], key=lambda sample: len(sample.tokens_S))
    samples[-1] = branch_of(first, geometry)
    rows = [
        {
            "id": sample.id,
            "group": sample.group,
            "prompt_id": sample.prompt_id,
            "prompt_tokens": sample.prompt_tokens_P.tolist(),
            "response_tokens": sample.response_tokens_G.tolist(),
            "loss_mask": sample.loss_mask_G.tolist(),
            "logprobs": sample.logprobs_G.tolist(),
            "finish_reason": sample.finish_reason,
            "reward": sample.reward,
            "branch_of": sample.branch_of,
            "sets": sample.routes.sets_TLK.copy(),
            "valid": sample.routes.valid_T,
        }
        for sample in samples
    ]
    write_step(root, 0, rows, geometry.experts, geometry.topk, list(geometry.layers))
    return samples


@pytest.mark.parametrize("experts", [16, 300])
def test_the_project_reads_and_verifies_files_of_another_writer(tmp_path, experts):
    samples = write_as_a_stranger(tmp_path, Geometry(experts, 4, (1, 2, 5)))
    store = open_store(str(tmp_path))
    assert [str(problem) for problem in verify(store).problems] == []
    manifest = read_manifest(store, 0)
    ids = [sample.id for sample in samples]
    routes, some = read_routes(store, manifest, ids), read_routes(store, manifest, ids, [5])
    for sample, found in zip(samples, read_samples(store, manifest, ids), strict=True):
        assert equal(routes[sample.id], sample.routes)
        assert np.array_equal(some[sample.id].sets_TLK, routes[sample.id].sets_TLK[:, 2:])
        assert np.array_equal(found.tokens_S, sample.tokens_S)
        assert np.array_equal(found.logprobs_G, sample.logprobs_G)
        assert (found.reward, found.version_spans) == (sample.reward, sample.version_spans)
        assert found.branch_of == sample.branch_of


def test_a_branch_may_use_segments_of_its_first_sequence(tmp_path):
    """The other writer stores branches in this way. Segments of unrelated samples are refused."""
    *_, branch = write_as_a_stranger(tmp_path, Geometry(16, 4, (1, 2, 5)))
    files = [path for path in tmp_path.rglob("*.parquet") if "routes" in path.name]
    owners = pq.read_table(files[0])["owner"].to_pylist()
    store = open_store(str(tmp_path))
    manifest = read_manifest(store, 0)
    [row] = manifest.select([branch.id]).to_pylist()
    [part] = row["routes"]
    shared = [owners[place["row"]] for place in part["segments"]]
    assert set(shared) == {branch.id, branch.branch_of}
    assert equal(read_routes(store, manifest, [branch.id])[branch.id], branch.routes)
    field = manifest.rows.schema.field("branch_of")
    at = manifest.rows.schema.get_field_index("branch_of")
    nobody = manifest.rows.set_column(at, field, pa.nulls(len(manifest.ids), pa.string()))
    with pytest.raises(TraceError, match=f"sample {branch.id}: a segment of {branch.branch_of}"):
        read_routes(store, replace(manifest, rows=nobody), [branch.id])


def test_the_second_reader_reads_the_second_writer(tmp_path):
    assert_reads(tmp_path, write_as_a_stranger(tmp_path, Geometry(300, 4, (1, 2, 5))))


def test_a_recorded_set_can_be_made_from_files_of_another_writer(tmp_path):
    write_as_a_stranger(tmp_path / "a", Geometry(16, 4, (1, 2, 5)))
    source, target = open_store(str(tmp_path / "a")), open_store(str(tmp_path / "b"))
    write_recorded_set(source, target, 0)
    assert [str(problem) for problem in verify(target).problems] == []


def test_the_writer_imports_nothing_of_the_project():
    folder = Path(__file__).parent
    command = [
        sys.executable,
        "-I",
        "-c",
        f"import sys; sys.path.append({str(folder)!r})" + PROGRAM,
    ]
    subprocess.run(command, check=True, timeout=120)
