"""The number of threads changes neither the objects written nor the routes read."""

import numpy as np
import pytest

from pipeline import threads
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError
from pipeline.store import StoreError, open_store
from pipeline.traces import Geometry, read_manifest, read_routes, seal, write_shard
from pipeline.traces.format.header import read_header
from pipeline.traces.read import parts, reader
from pipeline.traces.write import files
from tests.samples import R3, make_samples

GEOMETRY = Geometry(experts=300, topk=5, layers=tuple(range(7)))
SAMPLES = make_samples(prompts=12, geometry=GEOMETRY)
IDS = sorted(sample.id for sample in SAMPLES)


@pytest.fixture
def small_pieces(monkeypatch, small_row_groups):
    """Lower the limits, so that every file is large enough for several threads."""
    for module in (files, parts):
        monkeypatch.setattr(module, "_MUCH", 0)
    monkeypatch.setattr(reader, "_TOGETHER", 2)


def written(monkeypatch, folder, cores):
    monkeypatch.setattr(threads, "core_count", lambda: cores)
    store = open_store(str(folder / str(cores)))
    write_shard(store, 0, 0, "0123abcd", SAMPLES, GEOMETRY, R3)
    return store


def test_objects_are_the_same_for_any_number_of_threads(monkeypatch, tmp_path, small_pieces):
    stores = [written(monkeypatch, tmp_path, cores) for cores in (1, 2, 64)]
    objects = [{info.key: store.read(info.key) for info in store.list("")} for store in stores]
    assert len(objects[0]) == 3
    assert objects[0] == objects[1] == objects[2]


@pytest.mark.parametrize("layers", [None, [4], [1, 2, 6]])
def test_routes_are_the_same_for_any_number_of_threads(monkeypatch, tmp_path, small_pieces, layers):
    store = written(monkeypatch, tmp_path, 2)
    seal(store, 0, 1, lambda _: IDS, 0)
    manifest = read_manifest(store, 0)
    found = []
    for cores in (1, 2, 64):
        monkeypatch.setattr(threads, "core_count", lambda cores=cores: cores)
        found.append(read_routes(store, manifest, IDS, layers))
    for id in IDS:
        for other in found[1:]:
            assert np.array_equal(found[0][id].sets_TLK, other[id].sets_TLK)
            assert np.array_equal(found[0][id].valid_T, other[id].valid_T)


def test_errors_are_the_same_for_any_number_of_threads(monkeypatch, tmp_path, small_pieces):
    """The error names the first damaged piece, even if another thread finds later damage sooner."""
    store = written(monkeypatch, tmp_path, 2)
    seal(store, 0, 1, lambda _: IDS, 0)
    manifest = read_manifest(store, 0)
    (file,) = (f for f in read_header(store, keys.rollout(0, 0)).files if f.role == "routes")
    path = next(tmp_path.rglob("*.routes.parquet"))
    content = bytearray(path.read_bytes())
    for at in range(100, file.footer.offset, 50):
        content[at] ^= 1
    path.write_bytes(content)
    texts = set()
    for cores in (1, 2, 64, 64):
        monkeypatch.setattr(threads, "core_count", lambda cores=cores: cores)
        with pytest.raises(CorruptObjectError, match=r"its commit records") as error:
            read_routes(store, manifest, IDS)
        texts.add(str(error.value))
    assert len(texts) == 1


def test_a_store_error_is_raised_and_leaves_no_object(monkeypatch, tmp_path, small_pieces):
    """An error in the writing thread is raised in the caller, and no object remains."""
    monkeypatch.setattr(threads, "core_count", lambda: 4)
    store = open_store(str(tmp_path))
    upload = store.upload

    def failing(key):
        opened = upload(key)
        whole, sizes = opened.write, []

        def write(data):
            sizes.append(len(data))
            if key.endswith(".routes.parquet") and sum(sizes) > 300:
                raise StoreError(f"create {key}: the disk is gone")
            return whole(data)

        opened.write = write
        return opened

    monkeypatch.setattr(store, "upload", failing)
    with pytest.raises(StoreError, match="the disk is gone"):
        write_shard(store, 0, 0, "0123abcd", SAMPLES, GEOMETRY, R3)
    assert list(store.list("")) == []
