"""docs/trace-format.md: its reader, its queries, and the names and limits that it lists."""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from pipeline.model.geometry import MOST_EXPERTS, MOST_TOPK
from pipeline.model.limits import MOST_TOKENS
from pipeline.recorded import seal_replay
from pipeline.run.commit import MOST_BYTES
from pipeline.store import Store, open_store
from pipeline.traces import Geometry, Sample, seal, token_digest, write_step
from pipeline.traces.format import domain, schema
from pipeline.traces.format.header import TraceFile
from pipeline.traces.format.manifest import BASELINE, NO_REWARD
from pipeline.traces.write.rows import ROUTES_ROWS
from tests.paths import ROOT
from tests.samples import (
    GEOMETRY,
    R3,
    by_shard,
    make_samples,
    sealed_r2,
    sealed_r3,
    train,
    write_run,
    write_shards,
)
from tests.weights import digest_of, safetensors

PAGE = (ROOT / "docs/trace-format.md").read_text()
READER, VIEWS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(SQL,) = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
TWO_BYTES = Geometry(experts=300, topk=3, layers=(0, 7))
SAMPLES = make_samples()


def read_step(store: Store, **options: str) -> dict[str, dict[str, Any]]:
    """Read step 0 with the page's reader."""
    found: dict[str, Any] = {}
    exec(READER, found)
    read: Callable[..., dict[str, dict[str, Any]]] = found["read_step"]
    return read(store.uri.removeprefix("file://"), 0, **options)


def check(found: dict[str, dict[str, Any]], samples: Sequence[Sample]) -> None:
    """Compare all values that the page's reader returned with those that were written."""
    assert sorted(found) == sorted(sample.id for sample in samples)
    for sample in samples:
        row, routes = found[sample.id], sample.routes
        assert routes is not None
        for name, expected in (
            ("prompt_tokens", sample.prompt_tokens_P),
            ("response_tokens", sample.response_tokens_G),
            ("loss_mask", sample.loss_mask_G),
            ("logprobs", sample.logprobs_G),
            ("valid", routes.valid_T),
        ):
            assert np.array_equal(np.array(row[name], expected.dtype), expected), name
        assert row["sets"].shape == routes.sets_TLK.shape
        assert np.array_equal(row["sets"][routes.valid_T], routes.sets_TLK[routes.valid_T])
        for name in (
            *("id", "group", "prompt_id", "branch_of", "finish_reason"),
            *("seed", "reward", "reward_error"),
        ):
            assert row[name] == getattr(sample, name), name
        assert json.loads(row["extras"]) == sample.extras
        assert row["version_spans"] == [asdict(span) for span in sample.version_spans]
        assert row["policy_version"] == min(span.version for span in sample.version_spans)
        assert row["prompt_length"] == len(sample.prompt_tokens_P)
        assert row["response_length"] == len(sample.response_tokens_G)
        assert row["token_digest"] == token_digest(sample.tokens_S)
        assert row["rows_total"] == len(routes.valid_T)


def test_the_reader_is_short():
    assert len(READER.splitlines()) <= 40


def test_the_reader_reads_the_engines_routes(tmp_path):
    store = open_store(str(tmp_path))
    sealed_r3(store, SAMPLES)
    found = read_step(store)
    check(found, SAMPLES)
    assert all(row["rows_valid"] == row["valid"].sum() for row in found.values())


def test_the_reader_reads_the_trainers_routes(tmp_path):
    """Two pipeline stages and two data-parallel ranks recorded them."""
    store = open_store(str(tmp_path))
    sealed_r2(store, SAMPLES)
    check(read_step(store, routes="training.json"), SAMPLES)


def test_the_reader_distinguishes_the_engines_routes_from_the_trainers(tmp_path):
    store = open_store(str(tmp_path))
    sealed_r3(store, SAMPLES, training=True)
    others = [
        replace(sample, routes=other.routes)
        for sample, other in zip(SAMPLES, make_samples(seed=0, known=0.5), strict=True)
        if sample.routes is not None and other.routes is not None
    ]
    train(store, others)
    check(read_step(store), SAMPLES)
    check(read_step(store, routes="training.json"), others)


def test_the_reader_reads_ids_of_two_bytes(tmp_path):
    store = open_store(str(tmp_path))
    samples = make_samples(geometry=TWO_BYTES)
    write_step(store, 0, samples, TWO_BYTES, R3)
    found = read_step(store)
    check(found, samples)
    assert max(row["sets"].max() for row in found.values()) > 255


def test_the_reader_leaves_out_rejected_groups(tmp_path):
    store = open_store(str(tmp_path))
    write_shards(store, SAMPLES)
    kept = [sample for sample in SAMPLES if sample.prompt_id != "2"]
    ids = by_shard([sample.id for sample in kept], 2)
    seal(store, 0, 2, ids, 0, rejected={"000000/2": "all rewards are equal"})
    check(read_step(store), kept)


def test_the_reader_reads_a_replayed_step(tmp_path):
    """Its manifest lists copies of the set's files, even if these contain R2 routes."""
    source, run = (open_store(str(tmp_path / name)) for name in ("set", "run"))
    sealed_r2(source, SAMPLES)
    write_run(run, SAMPLES, "R2", replay_file=source.uri)
    seal_replay(run, source, 0, None)
    check(read_step(run), SAMPLES)


def test_the_reader_reads_a_sample_of_one_token(tmp_path):
    store = open_store(str(tmp_path))
    short = make_samples(prompts=1, n=1)[0]
    assert short.routes is not None
    none = replace(short.routes, sets_TLK=short.routes.sets_TLK[:0], valid_T=np.ones(0, np.bool_))
    short = replace(
        short,
        prompt_tokens_P=short.prompt_tokens_P[:1],
        response_tokens_G=short.response_tokens_G[:0],
        loss_mask_G=short.loss_mask_G[:0],
        logprobs_G=short.logprobs_G[:0],
        version_spans=(replace(short.version_spans[0], end=0),),
        routes=none,
    )
    write_step(store, 0, [short], GEOMETRY, R3)
    check(read_step(store), [short])


def test_the_reader_refuses_a_changed_file(tmp_path):
    store = open_store(str(tmp_path))
    manifest = sealed_r3(store, SAMPLES)
    path = tmp_path / manifest.files[0].key
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    with pytest.raises(AssertionError):
        read_step(store)


def test_the_queries_return_the_written_values(tmp_path):
    """The files also contain the samples of a rejected group, which do not belong to the step."""
    duckdb = pytest.importorskip("duckdb")
    store = open_store(str(tmp_path))
    samples = make_samples(prompts=4, n=3)
    write_shards(store, samples)
    kept = [sample for sample in samples if sample.prompt_id != "2"]
    ids = by_shard([sample.id for sample in kept], 2)
    seal(store, 0, 2, ids, 0, rejected={"000000/2": "too long"}, baselines=["000000/0/2"])
    program = READER + VIEWS
    exec(program, {"run": str(tmp_path), "step": 0})
    rewards, loads, unlikely = (
        duckdb.sql(query).fetchall() for query in SQL.split(";\n") if query.strip()
    )
    trained: dict[str, list[float]] = {}
    for sample in kept:
        if sample.id != "000000/0/2" and sample.reward is not None:
            trained.setdefault(sample.prompt_id, []).append(sample.reward)
    assert [row[0] for row in rewards] == sorted(trained)
    for prompt_id, count, mean, best in rewards:
        of_prompt = trained[prompt_id]
        assert (count, best) == (len(of_prompt), max(of_prompt))
        assert mean == pytest.approx(np.mean(of_prompt))
    check_loads(loads, kept)
    check_unlikely(unlikely, kept)


def check_loads(found: list[tuple[str, int, int]], samples: Sequence[Sample]) -> None:
    expected: Counter[tuple[str, int]] = Counter()
    for sample in samples:
        assert sample.routes is not None
        valid = sample.routes.sets_TLK[sample.routes.valid_T]
        for i, layer in enumerate(GEOMETRY.layers):
            for expert in valid[:, i].ravel().tolist():
                expected[schema.layer_column(layer), expert] += 1
    assert {(layer, expert): load for layer, expert, load in found} == expected


def check_unlikely(found: list[tuple[str, int, int, str]], samples: Sequence[Sample]) -> None:
    expected = []
    for sample in samples:
        assert sample.routes is not None
        P = len(sample.prompt_tokens_P)
        for g, logprob in enumerate(sample.logprobs_G.tolist()):
            row = P + g - 1  # the model was fed this token to sample response token g
            if logprob < -0.9 and sample.routes.valid_T[row]:
                ids = bytes(sample.routes.sets_TLK[row, GEOMETRY.layers.index(5)].tolist())
                token = int(sample.response_tokens_G[g])
                expected.append((sample.id, row, token, ids.hex().upper()))
    assert len(expected) > 1
    assert found == sorted(expected)


def test_the_weights_digest_is_as_on_the_page(tmp_path):
    """It covers all tensors, however they are split into files."""
    arrays = {"gate": np.arange(4, dtype=np.float32).reshape(2, 2), "bias": np.ones(3, np.uint8)}
    dtypes = {"gate": "F32", "bias": "U8"}
    listed = [
        [name, dtypes[name], list(array.shape), sha256(array.tobytes()).hexdigest()]
        for name, array in sorted(arrays.items())
    ]
    expected = sha256(json.dumps(listed, separators=(",", ":")).encode()).hexdigest()
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "model.safetensors").write_bytes(safetensors(arrays))
    for name, array in arrays.items():
        (tmp_path / f"{name}.safetensors").write_bytes(safetensors({name: array}))
    assert digest_of(tmp_path / "one") == digest_of(tmp_path) == expected


def test_the_page_lists_every_column_and_key():
    columns = {*schema.SAMPLES.names, *schema.MANIFEST.names, *schema.TOKEN.names}
    keys = {field.name for field in fields(TraceFile)}
    commit = {"format", "run", "geometry", "provenance", "policies", "files", "maker", "shards"}
    commit |= {"training", "rejected", "counts", "policy_versions", "data", "manifest_sha256"}
    names = {*columns, *keys, *commit, "attempt", "content_sha256"}
    assert sorted(name for name in names if f"`{name}`" not in PAGE) == []


def test_the_page_gives_the_limits_and_constants():
    for text in (
        f"| `format` | `{schema.FORMAT}`.",
        f"E <= {MOST_EXPERTS:,} and K <= {MOST_TOPK}",
        f"{MOST_TOKENS:,} tokens",
        f"{domain.MOST_SPANS:,} spans",
        f"{domain.NAME_BYTES:,}",
        f"commits <= {MOST_BYTES >> 20} MiB",
        f"{ROUTES_ROWS:,} rows",
        f"`{NO_REWARD}`",
        f"`{BASELINE}`",
    ):
        assert text in " ".join(PAGE.split())
