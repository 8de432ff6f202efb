"""A writer of sealed steps, written only from docs/trace-format.md without importing Retrace.

Where the page allows a choice, it chooses differently from Retrace: no shared segments, segments
and row groups of odd sizes, small pages of version 2, no dictionaries, compact JSON, every column
optional, and columns and keys from a later minor version.
"""

import json
from hashlib import sha256

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TEXT, INT, LONG = pa.string(), pa.int32(), pa.int64()
TOKENS, PLACES = pa.list_(pa.uint32()), pa.list_(pa.struct([("row", INT), ("tokens", INT)]))
SPANS = pa.list_(pa.struct([("version", INT), ("start", INT), ("end", INT)]))
SUMMARY = {"id": TEXT, "group": TEXT, "prompt_id": TEXT, "policy_version": INT}
SUMMARY |= {"prompt_length": INT, "response_length": INT, "reward": pa.float64()}
SUMMARY |= {"reward_error": TEXT, "token_digest": TEXT, "routes_digest": TEXT, "rows_valid": INT}
SUMMARY |= {"rows_total": INT, "branch_of": TEXT}
SAMPLES = {**SUMMARY, "segments": PLACES, "prompt_tokens": TOKENS, "response_tokens": TOKENS}
SAMPLES |= {"loss_mask": pa.list_(pa.bool_()), "logprobs": pa.list_(pa.float32())}
SAMPLES |= {"finish_reason": TEXT, "version_spans": SPANS, "seed": LONG, "extras": TEXT}
SAMPLES |= {"later": INT}
MANIFEST = {**SUMMARY, "samples": pa.struct([("file", INT), ("row", INT)])}
MANIFEST |= {"routes": pa.list_(pa.struct([("file", INT), ("segments", PLACES)]))}
MANIFEST |= {"part_digests": pa.list_(TEXT), "not_trained": TEXT}
SEGMENT = {"owner": TEXT, "token_start": INT, "tokens": INT, "validity": pa.binary()}


def hexdigest(*parts):
    return sha256(b"".join(bytes(part) for part in parts)).hexdigest()


def encode(sets_TK, experts):
    gaps = np.sort(sets_TK, axis=1).astype(int)
    gaps[:, 1:] -= gaps[:, :-1] + 1
    planes = [gaps % 256] if experts <= 256 else [gaps % 256, gaps // 256]
    return b"".join(plane.astype(np.uint8).tobytes() for plane in planes)


def write_file(root, key, role, types, rows, **metadata):
    """Write a file with these rows, and return its description for a commit."""
    metadata = {"format": "1.7", "role": role, "producer": "a stranger", **metadata}
    schema = pa.schema(types, {f"retrace.{name}": value for name, value in metadata.items()})
    table = pa.table({name: [row.get(name) for row in rows] for name in types}, schema)
    (root / key).parent.mkdir(parents=True, exist_ok=True)
    small = {"row_group_size": 3, "data_page_size": 1, "data_page_version": "2.0"}
    pq.write_table(table, root / key, compression="zstd", use_dictionary=False, **small)
    data, footer = (root / key).read_bytes(), pq.read_metadata(root / key)
    groups = [footer.row_group(g) for g in range(footer.num_row_groups)]
    chunks = [[group.column(i) for i in range(footer.num_columns)] for group in groups]

    def range_of(start, length):
        return [start, length, hexdigest(data[start : start + length])]

    length = int.from_bytes(data[-8:-4], "little") + 8
    return {
        "key": key,
        "size": len(data),
        "sha256": hexdigest(data),
        "role": role,
        "footer": range_of(len(data) - length, length),
        "leaves": [chunk.path_in_schema for chunk in chunks[0]],
        "row_groups": [
            {
                "rows": group.num_rows,
                "chunks": [range_of(c.data_page_offset, c.total_compressed_size) for c in columns],
            }
            for group, columns in zip(groups, chunks, strict=True)
        ],
    }


def write_commit(root, key, **body):
    body = {**body, "format": "1.7", "attempt": "0badcafe", "of_a_later_version": ["é"]}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    body["content_sha256"] = hexdigest(text.encode())
    with (root / key).open("x") as out:
        json.dump(body, out)
    return body


def write_step(root, step, samples, experts, topk, layers):
    """Seal a step of one shard.

    Each sample has the columns of a samples file that are not computed here, and also `sets`
    [S - 1, L, K] and `valid` [S - 1]. Branches follow their first sequences.
    """
    path = f"steps/{step:06d}"
    geometry = {"experts": experts, "topk": topk, "layers": layers}
    provenance = {"kind": "R3", "policy_version": 0, "engine": "sglang 0.5.5"}
    rows, segments, made = [], [], {}
    for sample in samples:
        row = dict(sample)
        sets, valid = np.sort(row.pop("sets")), row.pop("valid")
        sets[~valid] = np.arange(topk)
        row["segments"], made[row["id"]] = [], {}
        for start in range(0, len(sets), 5):
            part, known = sets[start : start + 5], valid[start : start + 5]
            place = {"row": len(segments), "tokens": len(part)}
            made[row["id"]][start] = part.tolist(), known.tolist(), place
            theirs = made.get(row.get("branch_of"), {}).get(start, [None])
            if theirs[:2] == (part.tolist(), known.tolist()):
                row["segments"].append(theirs[2])  # a branch shares its first sequence's segment
                continue
            row["segments"].append(place)
            segment = {"owner": row["id"], "token_start": start, "tokens": len(part)}
            segment["validity"] = np.packbits(known, bitorder="little").tobytes()
            for i, layer in enumerate(layers):
                segment[f"layer_{layer:05d}"] = encode(part[:, i], experts)
            segments.append(segment)
        tokens = np.array([*row["prompt_tokens"], *row["response_tokens"]], "<u4")
        width = "<u1" if experts <= 256 else "<u2"
        header = np.array([len(layers), experts, topk], "<u4")
        stored = np.ascontiguousarray(sets.swapaxes(0, 1), width)
        row["token_digest"] = hexdigest(tokens)
        row["routes_digest"] = hexdigest(header, stored, np.packbits(valid, bitorder="little"))
        row |= {"rows_valid": int(valid.sum()), "rows_total": len(sets)}
        row |= {"prompt_length": len(row["prompt_tokens"]), "seed": 7, "extras": "{}"}
        row |= {"response_length": len(row["response_tokens"]), "policy_version": 0}
        row["version_spans"] = [{"version": 0, "start": 0, "end": row["response_length"]}]
        rows.append(row)
    columns = SEGMENT | {f"layer_{layer:05d}": pa.binary() for layer in layers}
    coding = "gaps-uint8" if experts <= 256 else "gaps-uint16-planes"
    of_routes = {"geometry": json.dumps(geometry), "provenance": json.dumps(provenance)}
    of_routes["coding"] = coding
    name = f"{path}/rollout/00000.0badcafe"
    files = [
        write_file(root, f"{name}.samples.parquet", "samples", SAMPLES, rows),
        write_file(root, f"{name}.routes.parquet", "routes", columns, segments, **of_routes),
    ]
    policies = [{"version": 0, "weights_sha256": hexdigest(b"the weights")}]
    of_all = {"geometry": geometry, "provenance": provenance, "step": step, "policies": policies}
    key = f"{path}/rollout/00000.json"
    commit = write_commit(root, key, shard=0, files=files, samples=len(rows), maker={}, **of_all)
    for number, row in enumerate(rows):
        row["samples"] = {"file": 0, "row": number}
        row["routes"] = [{"file": 1, "segments": row["segments"]}]
        row["not_trained"] = "no reward" if row["reward"] is None else None
    rows.sort(key=lambda row: row["id"])
    file = write_file(root, f"{path}/manifest.0badcafe.parquet", "manifest", MANIFEST, rows)
    described = {"commit": key, "commit_sha256": commit["content_sha256"]}
    data = [{"key": f["key"], "sha256": f["sha256"], **described} for f in files]
    sums = {"samples": len(rows), "rows_total": sum(row["rows_total"] for row in rows)}
    sums["tokens"] = sums["rows_total"] + sums["samples"]
    sums["rows_valid"] = sum(row["rows_valid"] for row in rows)
    rest = {"files": [file], "data": data, "policy_versions": [0], "counts": sums}
    rest |= {"training": False, "rejected": []}
    write_commit(root, f"{path}/manifest.json", **rest, **of_all)
