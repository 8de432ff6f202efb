"""docs/trace-format.md is enough to read a shard: its example is run as it stands."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.store import open_store
from pipeline.traces import Geometry, write_shard
from pipeline.traces.schema import FORMAT, MANIFEST, SAMPLES, SEGMENT, file_metadata
from tests.unit.traces.make import R3, make_samples

PAGE = (Path(__file__).parents[3] / "docs/trace-format.md").read_text()

CHECK = """
import sys
assert not [name for name in sys.modules if name.split(".")[0] in ("pipeline", "operators")]
np.savez("out.npz", **{f"{id} {part}": array for id, pair in routes.items()
                       for part, array in zip(("sets", "valid"), pair)})
"""


@pytest.mark.parametrize("experts", [16, 300])
def test_the_example_decodes_a_shard(tmp_path, experts):
    """With pyarrow and numpy alone, in a process of its own, without any module of this project."""
    geometry = Geometry(experts, 4, (1, 2, 5))
    samples = make_samples(geometry=geometry)
    write_shard(open_store(str(tmp_path)), 0, 0, "aaaaaaaa", samples, geometry, R3)
    for role in ("samples", "routes"):
        file = tmp_path / f"steps/000000/rollout/00000.aaaaaaaa.{role}.parquet"
        file.rename(tmp_path / f"00000.{role}.parquet")
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    command = [sys.executable, "-I", "-c", example + CHECK]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    found = np.load(tmp_path / "out.npz")
    for sample in samples:
        valid = sample.routes.valid_T
        assert np.array_equal(found[f"{sample.id} valid"], valid)
        assert np.array_equal(found[f"{sample.id} sets"][valid], sample.routes.sets_TLK[valid])


def test_the_page_names_every_column_and_key():
    """What a file has and the page does not name, nobody could read in ten years."""
    names = {*SAMPLES.names, *SEGMENT.names, *MANIFEST.names}
    names |= set(file_metadata("routes", Geometry(16, 4, (1,)), R3))
    assert not [name for name in names if f"`{name}`" not in PAGE]
    assert f"version {FORMAT}" in PAGE


def test_the_page_names_every_key_of_a_commit(tmp_path):
    store = open_store(str(tmp_path))
    body = write_shard(store, 0, 0, "aaaaaaaa", make_samples(), Geometry(16, 4, (1, 2, 5)), R3).body
    keys = {*body, *body["files"][0], *body["files"][0]["row_groups"][0]}
    assert not [key for key in keys if f"`{key}`" not in PAGE], json.dumps(body)[:200]
