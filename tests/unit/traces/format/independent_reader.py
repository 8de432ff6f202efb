"""A reader of sealed steps, written only from docs/trace-format.md without importing Retrace."""

import io
import json
import re
from hashlib import sha256

import numpy as np
import pyarrow.parquet as pq


class Number(str):
    """A number as spelled in the text."""

    def __new__(cls, text):
        assert len(text) <= 100, text
        assert abs(float(text)) != float("inf"), text
        return str.__new__(cls, text)


def once(pairs):
    assert len(dict(pairs)) == len(pairs), "a key twice"
    return dict(pairs)


def refuse(name):
    raise ValueError(name)


def canonical(text, leave_out=None):
    """Return the canonical form of an object's text, without one of its keys."""
    number = {"parse_int": Number, "parse_float": Number, "parse_constant": refuse}
    body = json.loads(text, object_pairs_hook=once, **number)
    return written({key: value for key, value in body.items() if key != leave_out})


def written(value, depth=1):
    if isinstance(value, Number):
        return str(value)
    if not isinstance(value, dict | list):
        str(value).encode()  # raises for half of a surrogate pair
        return json.dumps(value)
    assert depth <= 64, "too deep"
    if isinstance(value, list):
        return "[" + ",".join(written(item, depth + 1) for item in value) + "]"
    items = (f"{written(key)}:{written(value[key], depth + 1)}" for key in sorted(value))
    return "{" + ",".join(items) + "}"


def read_commit(path):
    text = path.read_bytes().decode()
    content, body = canonical(text, "content_sha256"), json.loads(text)
    assert re.fullmatch(r"1\.(0|[1-9][0-9]*)", body["format"]), (path, body["format"])
    assert sha256(content.encode()).hexdigest() == body["content_sha256"], path
    return body


def read_file(root, ref, commit):
    file = next(file for file in commit["files"] if file["sha256"] == ref["sha256"])
    data = (root / ref["key"]).read_bytes()
    assert sha256(data).hexdigest() == file["sha256"], ref
    for at, length, digest in sum((g["chunks"] for g in file["row_groups"]), [file["footer"]]):
        assert sha256(data[at : at + length]).hexdigest() == digest, (ref, at)
    # A failed assertion must not end the program while pyarrow's threads are running.
    parquet = pq.ParquetFile(io.BytesIO(data), pre_buffer=False)
    groups = range(parquet.num_row_groups)
    groups = [parquet.read_row_group(g, use_threads=False).to_pylist() for g in groups]
    if file["role"] != "routes":
        return [row for rows in groups for row in rows]
    coding = parquet.metadata.metadata[b"retrace.coding"].decode()
    return [x for rows in groups for x in segments(rows, coding, **commit["geometry"])]


def segments(rows, coding, experts, topk, layers):
    """Yield the owner, first position, sets [n, K] by layer, and E of a row group's segments."""
    tokens, sets = [row["tokens"] for row in rows], {}
    for layer in layers:
        values = [row[f"layer_{layer:05d}"] for row in rows]
        sets[layer] = decode(values, tokens, coding, experts, topk)
        assert (np.diff(sets[layer], axis=1) > 0).all(), layer
        assert sets[layer].max(initial=0) < experts, layer
    for row, n, end in zip(rows, tokens, np.cumsum(tokens), strict=True):
        bits = np.frombuffer(row["validity"] or b"\xff" * n, np.uint8)
        valid = np.unpackbits(bits, bitorder="little")[:n, None] == 1
        mine = {layer: np.where(valid, rows[end - n : end], -1) for layer, rows in sets.items()}
        yield row["owner"], row["token_start"], mine, experts


def decode(values, tokens, coding, experts, topk):
    """Return the sets [N, K] of a row group in one layer."""
    width = 1 if experts <= 256 else 2
    data, ends = np.frombuffer(b"".join(values), np.uint8), width * topk * np.cumsum(tokens)
    if coding in ("ids-planes", "gaps-planes"):
        assert not any(values[1:])
        data = data.reshape(width * topk, sum(tokens)).T
    else:
        assert (np.cumsum([len(value) for value in values]) == ends).all()
        if coding == "gaps-uint16-planes":
            data = np.concatenate([x.reshape(2, -1).T for x in np.split(data, ends[:-1])])
        assert (
            coding in ("gaps-uint8 ids-uint8", "gaps-uint16-planes ids-uint16")[width - 1].split()
        )
    found = data.reshape(-1, topk, width) @ 256 ** np.arange(width)
    return found if coding.startswith("ids") else np.cumsum(found, axis=1) + np.arange(topk)


def read_sample(row, files):
    """Return tokens [S] and routes [L, S - 1, K] for a manifest row; invalid rows are -1."""
    sample = files[row["samples"]["file"]][row["samples"]["row"]]
    tokens = np.array(sample["prompt_tokens"] + sample["response_tokens"], "<u4")
    assert sha256(tokens).hexdigest() == row["token_digest"], row["id"]
    routes, found, parts = {}, [], row["routes"] or []
    digests = row.get("part_digests") or [None] * len(parts)
    for part, expected in zip(parts, digests, strict=True):
        mine, end = {}, 0
        for place in part["segments"]:
            owner, start, layers, E = files[part["file"]][place["row"]]
            assert owner in (row["id"], row["group"], row.get("branch_of")), row["id"]
            assert start >= end, row["id"]
            end = start + place["tokens"]
            taken = {layer: sets[: place["tokens"]] for layer, sets in layers.items()}
            found.append((start, taken))
            for layer, sets in taken.items():
                mine[layer] = np.concatenate([mine.get(layer, sets[:0]), sets])
        assert not mine or expected in (None, routes_digest(mine, E)), (row["id"], part["file"])
    for start, taken in sorted(found, key=lambda piece: piece[0]):  # R2 may spread rows over files
        for layer, sets in taken.items():
            before = routes.get(layer, sets[:0])
            assert start == len(before), row["id"]
            routes[layer] = np.concatenate([before, sets])
    if routes:
        known = {(len(sets), bytes(sets[:, 0] >= 0)) for sets in routes.values()}
        [(rows, valid)] = known  # identical in every layer
        assert (rows, row["rows_valid"]) in ((row["rows_total"], n) for n in (None, sum(valid)))
        assert row["routes_digest"] in (None, routes_digest(routes, E)), row["id"]
    return tokens, np.array([routes[layer] for layer in sorted(routes)])


def routes_digest(routes, experts):
    """Return the routes digest of the sets [n, K] of each layer; rows that are not valid are -1."""
    sets = np.array([routes[layer] for layer in sorted(routes)])
    (L, _, K), valid = sets.shape, sets[0, :, 0] >= 0
    stored = np.where(valid[:, None], sets, range(K)).astype("u1" if experts <= 256 else "<u2")
    parts = np.array([L, experts, K], "<u4"), stored, np.packbits(valid, bitorder="little")
    return sha256(b"".join(map(bytes, parts))).hexdigest()


def read_step(root, step):
    path, files = root / f"steps/{step:06d}", []
    manifest = read_commit(path / "manifest.json")
    for ref in manifest["data"]:
        commit = read_commit(root / ref["commit"])
        assert commit["content_sha256"] == ref["commit_sha256"], ref
        files.append(read_file(root, ref, commit))
    rows = {row["id"]: row for row in read_file(root, manifest["files"][0], manifest)}
    trained = read_training(root, path, manifest)
    for row in rows.values() if trained else ():
        row.update(routes=[], routes_digest=None, rows_valid=None, part_digests=None)
    for n, commit in enumerate(trained, len(files)):
        files.append(read_file(root, commit["files"][0], commit))
        mine = {}
        for i, (owner, _, layers, _) in enumerate(files[n]):  # the owner uses all tokens
            length = len(next(iter(layers.values())))
            mine.setdefault(owner, []).append({"row": i, "tokens": length})
        said = {id: rest for id, *rest in commit.get("digests", [])}
        for id, segments in mine.items():
            rows[id]["routes"].append({"file": n, "segments": segments})
            if said:
                tokens, routes, _, _ = said[id]
                assert tokens == rows[id]["token_digest"], (id, n)
                rows[id]["part_digests"] = (rows[id]["part_digests"] or []) + [routes]
    return {id: read_sample(row, files) for id, row in rows.items()}


def read_training(root, path, manifest):
    """Return the commits of the routes that the trainer recorded; [] if it recorded none."""
    if manifest["format"] == "1.0":  # no object names the commits
        return [read_commit(key) for key in sorted((path / "training").glob("*.json"))]
    if not manifest["training"]:
        return []
    named = read_commit(path / "training.json")
    commits = [read_commit(root / ref["key"]) for ref in named["commits"]]
    for ref, commit in zip(named["commits"], commits, strict=True):
        assert commit["content_sha256"] == ref["commit_sha256"], ref
        assert commit["manifest_sha256"] == manifest["content_sha256"], ref
    assert named["manifest_sha256"] == manifest["content_sha256"], path
    return commits
