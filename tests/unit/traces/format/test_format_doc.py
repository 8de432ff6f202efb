"""docs/trace-format.md suffices to read a shard: the page's example is run verbatim."""

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.model.geometry import MOST_EXPERTS, MOST_TOPK
from pipeline.policies.weights import scan_weights, weights_digest
from pipeline.run.commit import content_digest, read_commit
from pipeline.run.strict_json import canonical as canonical_form
from pipeline.run.strict_json import parse_json, parse_numbers
from pipeline.store import open_store
from pipeline.traces import (
    Geometry,
    Routes,
    VersionSpan,
    routes_digest,
    seal,
    token_digest,
    write_shard,
)
from pipeline.traces.format.codec import coding, decode, encode
from pipeline.traces.format.digests import validity_bits
from pipeline.traces.format.planes import decode_planes, encode_planes
from pipeline.traces.format.schema import (
    FORMAT,
    MANIFEST,
    SAMPLES,
    SEGMENT,
    file_metadata,
)
from pipeline.traces.write.segments import ROW_GROUP_TOKENS
from tests.paths import ROOT
from tests.samples import R3, make_samples
from tests.unit.traces.format import independent_reader

PAGE = (ROOT / "docs/trace-format.md").read_text()

CHECK = """
import sys
assert not [name for name in sys.modules if name.split(".")[0] in ("pipeline", "operators")]
np.savez("out.npz", **{f"{id} {part}": array for id, pair in routes.items()
                       for part, array in zip(("sets", "valid"), pair)})
"""


@pytest.mark.parametrize("experts", [16, 300])
def test_the_example_decodes_a_shard(tmp_path, experts):
    """The example needs only pyarrow and numpy: its process imports no module of this project."""
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
    """Without the page, a future reader could not interpret a column or key."""
    names = {*SAMPLES.names, *SEGMENT.names, *MANIFEST.names}
    names |= set(file_metadata("routes", Geometry(16, 4, (1,)), R3))
    assert not [name for name in names if f"`{name}`" not in PAGE]
    assert f"version {FORMAT}" in PAGE


def vectors(*header: str) -> list[list[str]]:
    """Return the rows of the page's table with this header."""
    lines = PAGE.splitlines()
    start = lines.index(f"| {' | '.join(header)} |") + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append(line.strip("| ").split(" | "))
    assert rows
    return rows


@pytest.mark.parametrize("row", vectors("sets", "E", "coded bytes"))
def test_the_coding_agrees_with_the_vectors(row):
    sets_TK, experts, data = np.array(json.loads(row[0])), int(row[1]), bytes.fromhex(row[2])
    assert encode(sets_TK, experts) == data
    assert decode(data, *sets_TK.shape, experts).tolist() == sets_TK.tolist()


@pytest.mark.parametrize("row", vectors("sets", "E", "bytes as ids"))
def test_the_coding_of_ids_agrees_with_the_vectors(row):
    sets_TK, experts, data = np.array(json.loads(row[0])), int(row[1]), bytes.fromhex(row[2])
    stored = coding(experts, gaps=False)
    assert encode(sets_TK, experts, stored) == data
    assert decode(data, *sets_TK.shape, experts, stored).tolist() == sets_TK.tolist()


def test_the_worked_examples_of_the_coding_are_correct():
    for sets, experts, _, data in vectors("sets", "E", "gaps", "bytes"):
        sets_TK = json.loads(f"[{sets}]".replace("{", "[").replace("}", "]"))
        written = bytes.fromhex(re.sub("`|then", "", data))
        assert encode(np.array(sets_TK), int(experts)) == written


def test_the_worked_examples_of_planes_are_correct():
    for sets, experts, *written in vectors("sets", "E", "`ids-planes`", "`gaps-planes`"):
        rows = json.loads("[" + re.sub("{(.*?)}(, | and )?", r"[\1],", sets).rstrip(",") + "]")
        sets_NK = np.array(rows, np.uint8 if int(experts) <= 256 else np.uint16)
        for gaps, data in zip((False, True), written, strict=True):
            coded = encode_planes(sets_NK, gaps=gaps)
            assert coded.tobytes() == bytes.fromhex(data.strip("`"))
            found_NK = np.empty_like(sets_NK)
            decode_planes(coded, found_NK, int(experts), gaps=gaps)
            assert np.array_equal(found_NK, sets_NK)


def test_the_digests_agree_with_the_vectors():
    for row in vectors("valid rows", "validity"):
        assert validity_bits(np.array(json.loads(row[0]), bool)) == bytes.fromhex(row[1])
    for tokens, digest in vectors("tokens", "token digest"):
        assert token_digest(np.array(json.loads(tokens))) == digest
    for files, digest in vectors("safetensors files", "weights digest"):
        found = [bytes.fromhex(file) for file in re.findall("`(.*?)`", files)]
        assert weights_digest(scan_weights([file]) for file in found) == digest
    for sets, valid, experts, digest in vectors(
        "sets [S - 1, L, K]", "valid rows", "E", "routes digest"
    ):
        routes = Routes(np.array(json.loads(sets)), np.array(json.loads(valid), bool))
        _, L, K = routes.sets_TLK.shape
        assert routes_digest(routes, Geometry(int(experts), K, tuple(range(L)))) == digest
    for body, canonical, digest in vectors(
        "object without `content_sha256`", "canonical form", "content digest"
    ):
        _, as_spelled = parse_numbers(body)
        assert canonical_form(as_spelled) == canonical == independent_reader.canonical(body)
        assert content_digest(as_spelled) == digest
        assert hashlib.sha256(canonical.encode()).hexdigest() == digest


@pytest.mark.parametrize("row", vectors("text that is not strict JSON", "reason"))
def test_text_that_is_not_strict_json_is_refused(row):
    text, _ = row
    for parse in (parse_json, independent_reader.canonical):
        with pytest.raises((ValueError, AssertionError)):
            parse(text)


def test_the_drawn_group_is_what_the_writer_stores(tmp_path):
    """The writer splits the samples in the drawn example into segments as the page shows."""
    letters = dict(re.findall(r"^(000003/17/\d) +((?:[a-n]   )+)", PAGE, re.MULTILINE))
    assert len(letters) == 3
    base = make_samples(prompts=1, n=3, known=1.0, geometry=Geometry(99, 1, (0,)))
    samples = []
    for (id, drawn), sample in zip(letters.items(), base, strict=True):
        sets_TLK = np.array([[[ord(letter) - ord("a")]] for letter in drawn.split()])
        G = len(sets_TLK) - 4
        tokens = {
            "prompt_id": "17",
            "prompt_tokens_P": np.arange(5, dtype=np.uint32),
            "response_tokens_G": np.arange(G, dtype=np.uint32),
        }
        lists = {"loss_mask_G": np.ones(G, bool), "logprobs_G": np.zeros(G, np.float32)}
        place = {"id": id, "group": "000003/17", "version_spans": (VersionSpan(0, 0, G),)}
        routes = Routes(sets_TLK, np.ones(len(sets_TLK), bool))
        samples.append(replace(sample, **tokens, **lists, **place, routes=routes))
    store = open_store(str(tmp_path))
    write_shard(store, 3, 0, "aaaaaaaa", samples, Geometry(99, 1, (0,)), R3)
    rollout = tmp_path / "steps/000003/rollout"
    for row in pq.read_table(rollout / "00000.aaaaaaaa.samples.parquet").to_pylist():
        places = " ".join(f"({p['row']}, {p['tokens']})" for p in row["segments"])
        assert f"{row['id']}   {places}\n" in PAGE
    table = pq.read_table(rollout / "00000.aaaaaaaa.routes.parquet").to_pylist()
    for number, row in enumerate(table):
        held = " ".join(chr(ord("a") + i) for i in row["layer_00000"])
        line = f"{number:<6}{row['owner']:<14}{row['token_start']:<14}{row['tokens']:<9}{held}\n"
        assert line in PAGE


def test_the_page_gives_the_limits():
    assert f"| E | 1 to {MOST_EXPERTS:,} |" in PAGE
    assert f"| K | 1 to {MOST_TOPK}, " in PAGE
    assert f"| number of tokens in a segment or row group | at most {ROW_GROUP_TOKENS:,}; " in PAGE


def test_the_page_names_every_key_of_a_commit(tmp_path):
    store, samples = open_store(str(tmp_path)), make_samples()
    body = write_shard(store, 0, 0, "aaaaaaaa", samples, Geometry(16, 4, (1, 2, 5)), R3).body
    seal(store, 0, 1, lambda _: [sample.id for sample in samples], 0)
    sealed = read_commit(store, "steps/000000/manifest.json")
    names = {*body, *body["files"][0], *body["files"][0]["row_groups"][0]}
    names |= {*sealed, *sealed["data"][0], *sealed["counts"]}
    assert not [name for name in names if f"`{name}`" not in PAGE]
