"""The statements in docs/trace-format.md, each with a way to break it and the resulting message.

Each of `CASES` breaks a statement in a small sealed step, whose digests are all recomputed
(tests/forging.py). `verify` must report every case, and readers must refuse those in `READING`.
`ELSEWHERE` lists the statements that other tests break. `FREE` lists those that no stored data can
break, with the reason.

The first text of a case is a quote from the page. For a table row, the quote consists of the row's
first cells.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa

from pipeline.run import keys
from pipeline.run.commit import CONTENT_SHA256, content_digest
from tests.forging import ForgedFile, Forgery

Forge = Callable[[Forgery], None]


class Case(NamedTuple):
    """A statement and a way to break it."""

    quote: str
    says: str
    """A regular expression that matches the message of `verify`."""
    forge: Forge


def sample(**changes: Any) -> Forge:
    """Change the first sample in the samples file and in the manifest."""
    return lambda forgery: forgery.sample(**changes)


def only_sample(**changes: Any) -> Forge:
    return lambda forgery: forgery.samples[0].update(changes)


def only_row(number: int = 0, **changes: Any) -> Forge:
    return lambda forgery: forgery.rows[number].update(changes)


def tokens(**changes: Any) -> Forge:
    return lambda forgery: forgery.tokens(**changes)


def segment(number: int = 0, **changes: Any) -> Forge:
    return lambda forgery: forgery.segments[number].update(changes)


def shard(**changes: Any) -> Forge:
    return lambda forgery: forgery.shards[0].body.update(changes)


def head(**changes: Any) -> Forge:
    return lambda forgery: forgery.manifest.body.update(changes)


def counted(**changes: Any) -> Forge:
    return lambda forgery: forgery.manifest.body["counts"].update(changes)


def of_file(role: str, change: Callable[[ForgedFile], object]) -> Forge:
    def forge(forgery: Forgery) -> None:
        commit = forgery.manifest if role == "manifest" else forgery.shards[0]
        change(commit.file(role))

    return forge


def metadata(file: str, /, **changes: str) -> Forge:
    named = {f"retrace.{name}": value for name, value in changes.items()}
    return of_file(file, lambda found: found.metadata.update(named))


def no_metadata(role: str, name: str) -> Forge:
    return of_file(role, lambda file: file.metadata.pop(f"retrace.{name}"))


def more_columns(role: str, column: str, type_: pa.DataType) -> Forge:
    def add(file: ForgedFile) -> None:
        file.schema = file.schema.append(pa.field(column, type_))

    return of_file(role, add)


def typed(role: str, column: str, type_: pa.DataType) -> Forge:
    return of_file(role, lambda file: file.retyped(column, type_))


def described(role: str, change: Callable[[dict[str, Any]], object]) -> Forge:
    return of_file(role, lambda file: file.describing.append(change))  # type: ignore[arg-type]


def renamed(role: str, old: str, new: str) -> Forge:
    """Rename a file in its commit and in the manifest."""

    def forge(forgery: Forgery) -> None:
        commit = forgery.manifest if role == "manifest" else forgery.shards[0]
        file = commit.file(role)
        before, file.key = file.key, file.key.replace(old, new)
        for ref in forgery.manifest.body["data"]:
            if ref["key"] == before:
                ref["key"] = file.key

    return forge


def coded(change: Callable[[bytes], bytes | str]) -> Forge:
    """Change the coded bytes of one layer in every segment."""

    def forge(forgery: Forgery) -> None:
        for row in forgery.segments:
            row["layer_00002"] = change(row["layer_00002"])

    return forge


def renumbered(layers: list[int], old: str, new: str) -> Forge:
    """Change the layers in every geometry, and the name of a column."""

    def forge(forgery: Forgery) -> None:
        geometry = {"experts": 16, "topk": 4, "layers": layers}
        for commit in (*forgery.shards, forgery.manifest):
            commit.body["geometry"] = geometry
        for made in forgery.shards:
            file = made.file("routes")
            file.metadata["retrace.geometry"] = json.dumps(geometry)
            names = [new if name == old else name for name in file.schema.names]
            file.schema = pa.schema(
                [pa.field(n, f.type) for n, f in zip(names, file.schema, strict=True)]
            )
            for row in file.rows:
                row[new] = row.pop(old)

    return forge


def geometry(**changes: int) -> Forge:
    """Change the geometry everywhere."""

    def forge(forgery: Forgery) -> None:
        for commit in (*forgery.shards, forgery.manifest):
            commit.body["geometry"] = {**commit.body["geometry"], **changes}
        for made in forgery.shards:
            file = made.file("routes")
            file.metadata["retrace.geometry"] = json.dumps(made.body["geometry"])

    return forge


def both(*forges: Forge) -> Forge:
    """Apply several changes in order."""

    def forge(forgery: Forgery) -> None:
        for change in forges:
            change(forgery)

    return forge


def all_samples(**changes: Callable[[Any], Any]) -> Forge:
    """Replace values of the first shard's samples with values computed from the old ones."""

    def forge(forgery: Forgery) -> None:
        for row in forgery.samples:
            row.update({name: change(row[name]) for name, change in changes.items()})

    return forge


def invalid_row(forgery: Forgery) -> None:
    """Store sets for a row that is not valid, although such a row must contain filler."""
    for file in (made.file("routes") for made in forgery.shards):
        for row in file.rows:
            if row["validity"] is not None:
                tokens = row["tokens"]
                bits = int.from_bytes(row["validity"], "little")
                place = next(i for i in range(tokens) if not bits >> i & 1)
                data = bytearray(row["layer_00001"])
                data[4 * place : 4 * place + 4] = bytes([3, 3, 0, 0])
                row["layer_00001"] = bytes(data)
                return
    raise AssertionError("all rows are valid")


def unused_bit(forgery: Forgery) -> None:
    row = next(row for row in forgery.segments if row["tokens"] % 8)
    whole = row["validity"] or b"\xff" * ((row["tokens"] + 7) // 8)
    row["validity"] = whole[:-1] + bytes([whole[-1] | 0x80])


def moved_id(id: str, group: str, prompt_id: str, branch_of: str | None = None) -> Forge:
    """Rename the first sample everywhere."""

    def forge(forgery: Forgery) -> None:
        old = forgery.samples[0]["id"]
        forgery.sample(id=id, group=group, prompt_id=prompt_id, branch_of=branch_of)
        for row in forgery.segments:
            row["owner"] = id if row["owner"] == old else row["owner"]
        forgery.rows.sort(key=lambda row: (row["samples"]["file"], row["id"]))

    return forge


def made_by(**changes: Any) -> Forge:
    """Change the provenance everywhere."""

    def forge(forgery: Forgery) -> None:
        for commit in (*forgery.shards, forgery.manifest):
            commit.body["provenance"] = {**commit.body["provenance"], **changes}
        for made in forgery.shards:
            made.file("routes").metadata["retrace.provenance"] = json.dumps(made.body["provenance"])

    return forge


def zero_tokens(forgery: Forgery) -> None:
    """Add a segment without rows, to which no sample refers."""
    row = forgery.segments[0]
    nothing = {name: b"" for name in row if name.startswith("layer_")}
    forgery.segments.append({**row, "token_start": 0, "tokens": 0, "validity": None, **nothing})


def dropped_row(forgery: Forgery) -> None:
    """Drop a sample from the manifest and from its counts."""
    row = forgery.rows.pop()
    counts = forgery.manifest.body["counts"]
    counts["samples"] -= 1
    counts["tokens"] -= row["rows_total"] + 1
    for name in ("rows_total", "rows_valid"):
        counts[name] -= row[name]


def dropped_shard(forgery: Forgery) -> None:
    """Drop all samples of the second shard, and its files from `data`."""
    number = len(forgery.shards[0].files)
    forgery.rows.sort(key=lambda row: row["samples"]["file"] < number)
    while forgery.rows[-1]["samples"]["file"] < number:
        forgery.rows.insert(0, forgery.rows.pop())
    while forgery.rows[-1]["samples"]["file"] >= number:
        dropped_row(forgery)
    data = forgery.manifest.body["data"]
    forgery.manifest.body["data"] = [r for r in data if r["commit"] == forgery.shards[0].key]


def twice(forgery: Forgery) -> None:
    """Make two rows of the manifest refer to the same sample of a shard."""
    one, two = (row for row in forgery.rows if row["group"] == "000000/1")
    two["samples"] = one["samples"]


def infinite(forgery: Forgery) -> None:
    sample = forgery.samples[0]
    sample["logprobs"] = [float("-inf")] * len(sample["logprobs"])


def without_routes(forgery: Forgery) -> None:
    """Drop the routes of the shards from the manifest."""
    data = forgery.manifest.body["data"]
    samples = [ref for ref in data if ".samples." in ref["key"]]
    forgery.manifest.body.update(geometry=None, provenance=None, data=samples)
    forgery.manifest.body["counts"]["rows_valid"] = None
    for row in forgery.rows:
        row.update(routes=None, routes_digest=None, rows_valid=None)
        row["samples"]["file"] = samples.index(data[row["samples"]["file"]])


def another_shards_routes(forgery: Forgery) -> None:
    """Make a row refer to another shard's routes file, which contains copies of the row's
    segments."""
    mine, other = (made.file("routes") for made in forgery.shards)
    sample = forgery.samples[0]
    places = [
        {"row": len(other.rows) + i, "tokens": place["tokens"]}
        for i, place in enumerate(sample["segments"])
    ]
    other.rows += [mine.rows[place["row"]] for place in sample["segments"]]
    keys_ = [ref["key"] for ref in forgery.manifest.body["data"]]
    row = next(row for row in forgery.rows if row["id"] == sample["id"])
    row["routes"] = [{"file": keys_.index(other.key), "segments": places}]


def unused_file(forgery: Forgery) -> None:
    data = forgery.manifest.body["data"]
    forgery.others["steps/000000/rollout/00000.0123abcd.routes.parquet"] = b"unused"
    data.append({**data[0], "key": "steps/000000/rollout/00000.0123abcd.routes.parquet"})


def rejected_twice(forgery: Forgery) -> None:
    """Reject group 1, the only group in its shard, and list it twice."""
    for row in [row for row in forgery.rows if row["group"] == "000000/1"]:
        forgery.rows.remove(row)
        counts = forgery.manifest.body["counts"]
        counts["samples"] -= 1
        counts["tokens"] -= row["rows_total"] + 1
        for name in ("rows_total", "rows_valid"):
            counts[name] -= row[name]
    group = {"group": "000000/1", "reason": "alike", "samples": 2}
    forgery.manifest.body["rejected"] = [group, group]


def swapped_data(forgery: Forgery) -> None:
    data = forgery.manifest.body["data"]
    data[0], data[1] = data[1], data[0]


def reversed_rows(forgery: Forgery) -> None:
    forgery.rows.reverse()


def by_shard_reversed(forgery: Forgery) -> None:
    forgery.rows.sort(key=lambda row: row["id"])


def another_digest(entry: dict[str, Any]) -> None:
    entry["row_groups"][0]["chunks"][0][2] = "0" * 64


def shifted(entry: dict[str, Any]) -> None:
    chunks = entry["row_groups"][0]["chunks"]
    chunks[0], chunks[1] = chunks[1], chunks[0]


def reordered(entry: dict[str, Any]) -> None:
    entry["leaves"].reverse()


def other_version(forgery: Forgery) -> None:
    """Add a policy to the manifest's list, although no shard names this policy."""
    forgery.manifest.body["policies"] = [{"version": 0, "weights_sha256": "a" * 64}]


def unlisted_version(forgery: Forgery) -> None:
    for commit in (*forgery.shards, forgery.manifest):
        commit.body["policies"] = [{"version": 7, "weights_sha256": "a" * 64}]


def flipped_bit(forgery: Forgery) -> None:
    """Flip a bit in the middle of the first samples file, after all digests were computed."""
    key = forgery.shards[0].file("samples").key
    data = bytearray(forgery.sealed().objects[key])
    data[len(data) // 2] ^= 1
    forgery.others[key] = bytes(data)


def other_content(forgery: Forgery) -> None:
    """Replace a shard's commit with another that has a correct digest of its own content."""
    shard = forgery.shards[0]
    body = {**json.loads(forgery.sealed().objects[shard.key]), "maker": {"worker": 7}}
    del body[CONTENT_SHA256]
    body[CONTENT_SHA256] = content_digest(body)
    forgery.others[shard.key] = json.dumps(body).encode()


A_DIGEST = "0" * 64
SIGNED = json.dumps({"step": 0, CONTENT_SHA256: content_digest({"step": 0})}).encode()

IDENTITY = [
    Case("| group |", "expected '000000/0'", sample(group="000000/00")),
    Case("| sample |", "expected the form", moved_id("000000/0/x", "000000/0", "0")),
    Case("Ids are unique within a step", "duplicated", sample(id="000000/0/1")),
    Case(
        "A `prompt_id` is any name",
        "expected a name without '/'",
        moved_id("000000/0/0/0", "000000/0/0", "0/0"),
    ),
    *(
        Case(
            "A `prompt_id` is any name", says, moved_id(f"000000/{name}/0", f"000000/{name}", name)
        )
        for name, says in ((".", "not '.' or '..'"), ("..", "not '.' or '..'"), ("", "empty"))
    ),
    Case(
        "written in decimal, without leading zeros",
        "expected the form",
        moved_id("000000/0/00", "000000/0", "0"),
    ),
    Case(
        "written in decimal, without leading zeros",
        "expected the form|branch_of",
        moved_id("000000/0/1.01", "000000/0", "0", "000000/0/1"),
    ),
    Case(
        "A writer must form ids in this way, with the number of the sample's step",
        "its id contains step 000001",
        moved_id("000001/0/0", "000001/0", "0"),
    ),
    Case(
        "but refuses characters that must not reach",
        r"contains U\+001B",
        moved_id("000000/\x1b/0", "000000/\x1b", "\x1b"),
    ),
    Case(
        "but refuses characters that must not reach",
        r"contains U\+2066",
        moved_id("000000/\u2066/0", "000000/\u2066", "\u2066"),
    ),
    Case(
        "finish reasons, the engine's name, and the reasons",
        r"contains U\+001B",
        made_by(engine="\x1b"),
    ),
    Case(
        "finish reasons, the engine's name, and the reasons",
        r"sample 000000/0/0: not_trained: .* contains U\+000A",
        only_row(not_trained="a\nb"),
    ),
    Case(
        "finish reasons, the engine's name, and the reasons",
        r"reason of a rejected group: .* contains U\+000A",
        head(rejected=[{"group": "000000/9", "reason": "a\nb", "samples": 2}]),
    ),
]

BRANCHES = [
    Case(
        "A branch is in the same group and in the same shard as its first sequence",
        "a branch of 000000/1/0, which is not a first sequence",
        moved_id("000000/1/0.1", "000000/1", "1", "000000/1/0"),
    ),
    Case(
        "Its `branch_of` is the id of the first sequence",
        "a branch of 000000/0/7, which is not a first sequence",
        moved_id("000000/0/7.1", "000000/0", "0", "000000/0/7"),
    ),
    Case(
        "Its `branch_of` is the id of the first sequence",
        "branch_of 000000/2/0, expected 000000/0/1",
        moved_id("000000/0/1.1", "000000/0", "0", "000000/2/0"),
    ),
    Case(
        "The id of branch b is `{branch_of}.{b}`",
        "expected the form|branch_of",
        moved_id("000000/0/1.0", "000000/0", "0", "000000/0/1"),
    ),
    Case(
        "A first sequence is not a branch of another sequence",
        "expected the form|branch_of",
        moved_id("000000/0/1.1.1", "000000/0", "0", "000000/0/1.1"),
    ),
]

LIMITS = [
    Case(
        "| number of layers in a geometry |",
        "at least one layer",
        head(geometry={"experts": 16, "topk": 4, "layers": []}),
    ),
    Case("| `seed` | -1 to 2^63 - 1", "seed: -2, expected -1", only_sample(seed=-2)),
    Case("| `reward` | a finite number |", "reward nan", sample(reward=float("nan"))),
    Case("| `logprobs` | finite numbers, or NaN; never infinite |", "infinite log-probs", infinite),
    Case("| E |", "expected 0 < topk <= experts <= 65536", geometry(experts=65_537)),
    Case("| K |", "topk <= 64", geometry(topk=65)),
    Case(
        "| counts, positions, rows, versions |",
        "policy version of the provenance: 2147483648",
        made_by(policy_version=2**31),
    ),
    Case(
        "| `id`, `group`, `prompt_id`, `branch_of`",
        "bytes of UTF-8, expected",
        moved_id(f"000000/{'x' * 1_100}/0", f"000000/{'x' * 1_100}", "x" * 1_100),
    ),
    *(
        Case("| `id`, `group`, `prompt_id`, `branch_of`", "1100 bytes of UTF-8, expected", forge)
        for forge in (
            only_sample(finish_reason="x" * 1_100),
            made_by(engine="x" * 1_100),
            only_row(not_trained="x" * 1_100),
            head(rejected=[{"group": "000000/9", "reason": "x" * 1_100, "samples": 2}]),
        )
    ),
    Case(
        "| `reward_error`; `extras` as JSON |",
        "reward_error: 1100000 bytes",
        sample(reward=None, reward_error="x" * 1_100_000),
    ),
    Case(
        "| `reward_error`; `extras` as JSON |",
        "extras: 11000.. bytes of UTF-8, expected at most 1048576",
        only_sample(extras=json.dumps({"a": "x" * 1_100_000})),
    ),
    Case(
        "| `reward_error`; `extras` as JSON |",
        "extras: 12000.. bytes of UTF-8, expected at most 1048576",
        only_sample(extras=json.dumps({"a": "é" * 600_000}, ensure_ascii=False)),
    ),
    *(
        Case("| `reward_error`; `extras` as JSON |", f"invalid JSON in extras: .*{says}", forge)
        for says, forge in (
            ("too large or too long", only_sample(extras='{"a": 1e400}')),
            ("is too long", only_sample(extras='{"a": 1' + "0" * 100 + "}")),
            ("nested more than 64 deep", only_sample(extras='{"a":' * 65 + "1" + "}" * 65)),
            ("half of a surrogate pair", only_sample(extras='{"a": "\\ud800"}')),
        )
    ),
    Case(
        "| number of version spans in a sample |",
        "version spans",
        only_sample(version_spans=[{"version": 0, "start": 0, "end": 0}] * 65_537),
    ),
    Case(
        "| counts, positions, rows, versions |",
        "of a version span: -1, expected",
        sample(policy_version=-1, version_spans=[{"version": -1, "start": 0, "end": 12}]),
    ),
    Case(
        "| token ids |",
        r"INT64 \(UINT_64\) in 1 list, expected INT32 \(UINT_32\)",
        typed("samples", "prompt_tokens", pa.list_(pa.uint64())),
    ),
    Case(
        "| layer index |",
        "layers ascending up to 99999",
        renumbered([1, 2, 100_000], "layer_00005", "layer_100000"),
    ),
]

PARQUET = [
    *(
        Case(
            "| optional or required |", f"column {name} contains null", only_sample(**{name: value})
        )
        for name, value in {
            "finish_reason": None,
            "loss_mask": None,
            "version_spans": None,
            "response_tokens": [None],
        }.items()
    ),
    Case(
        "| string |",
        "id is BYTE_ARRAY, expected BYTE_ARRAY .STRING",
        typed("samples", "id", pa.binary()),
    ),
    Case(
        "| binary |",
        r"layer_00002 is BYTE_ARRAY \(STRING\), expected BYTE_ARRAY",
        both(typed("routes", "layer_00002", pa.string()), coded(lambda data: data.decode())),
    ),
    Case(
        "| int32, int64 |",
        "rows_total is INT64, expected INT32",
        typed("samples", "rows_total", pa.int64()),
    ),
    Case(
        "| int32, int64 |",
        "seed is INT32, expected INT64",
        both(typed("samples", "seed", pa.int32()), all_samples(seed=lambda _: 1)),
    ),
    Case(
        "| uint32 |",
        r"prompt_tokens.list.element is INT32 in 1 list, expected INT32 \(UINT_32\)",
        typed("samples", "prompt_tokens", pa.list_(pa.int32())),
    ),
    Case(
        "| double, float |",
        "logprobs.list.element is DOUBLE",
        typed("samples", "logprobs", pa.list_(pa.float64())),
    ),
    Case("| double, float |", "reward is FLOAT", typed("manifest", "reward", pa.float32())),
    Case(
        "| bool |",
        "loss_mask.list.element is INT32",
        both(
            typed("samples", "loss_mask", pa.list_(pa.int32())),
            all_samples(loss_mask=lambda mask: [int(counts) for counts in mask]),
        ),
    ),
    Case(
        "| list of x |",
        "prompt_tokens.list.element is missing",
        both(
            typed("samples", "prompt_tokens", pa.list_(pa.list_(pa.uint32()))),
            all_samples(prompt_tokens=lambda tokens: [tokens]),
        ),
    ),
    Case(
        "| (a, b) |",
        "samples.row is missing|samples has",
        typed("manifest", "samples", pa.struct([("file", pa.int32())])),
    ),
    Case("| `retrace.format` |", "no retrace.format", no_metadata("samples", "format")),
    Case("| `retrace.format` |", "2.0 is newer", metadata("manifest", format="2.0")),
    Case(
        "| `retrace.role` |", "a routes file, expected samples", metadata("samples", role="routes")
    ),
    Case("| `retrace.producer` |", "no retrace.producer", no_metadata("samples", "producer")),
    Case(
        "| `retrace.geometry` |",
        "as in its commit|its commit records",
        metadata("routes", geometry='{"experts": 17, "topk": 4, "layers": [1, 2, 5]}'),
    ),
    Case(
        "| `retrace.coding` |",
        "coding 'gaps-uint16-planes'",
        metadata("routes", coding="gaps-uint16-planes"),
    ),
    Case(
        "| `retrace.provenance` |",
        r'its provenance is \{"kind": "R3", "policy_version": 1, .*its commit records',
        metadata(
            "routes", provenance='{"kind": "R3", "policy_version": 1, "engine": "vllm 0.32.0"}'
        ),
    ),
    Case("| `retrace.provenance` |", "its provenance is None", no_metadata("routes", "provenance")),
    Case(
        "| `retrace.provenance` |",
        "contains the key 'kind' twice",
        metadata("routes", provenance='{"kind": "R2", "kind": "R3", "policy_version": 0}'),
    ),
]

SAMPLES = [
    Case("| `id` | string |", "id", only_sample(id="000000/0/7")),
    Case("| `group` | string |", "group", only_row(group="000000/7")),
    Case("| `prompt_id` | string |", "prompt 0, but its prompt_id is 7", sample(prompt_id="7")),
    Case(
        "| `policy_version` | int32 |",
        "policy_version 3, but its .* spans require 0",
        sample(policy_version=3),
    ),
    Case(
        "| `prompt_length`, `response_length` | int32 |",
        "prompt_length 99, but its tokens",
        sample(prompt_length=99),
    ),
    Case(
        "| `prompt_length`, `response_length` | int32 |",
        "response_length 99, but its tokens",
        sample(response_length=99),
    ),
    Case(
        "| `prompt_length`, `response_length` | int32 |",
        "prompt_length is",
        only_row(prompt_length=99),
    ),
    Case("| `reward` | double |", "reward NaN|reward nan", sample(reward=float("nan"))),
    Case("| `reward` | double |", "reward inf", sample(reward=float("inf"))),
    Case("| `reward` | double |", "reward is 9.0", only_row(reward=9.0)),
    Case(
        "| `reward_error` | string |",
        "a reward and a reward_error",
        sample(reward_error="it raised"),
    ),
    Case("| `reward_error` | string |", "reward_error is 'other'", only_row(reward_error="other")),
    Case("| `token_digest` | string |", "its tokens have digest", sample(token_digest=A_DIGEST)),
    Case("| `routes_digest` | string |", "its routes have digest", sample(routes_digest=A_DIGEST)),
    Case("| `routes_digest` | string |", "routes_digest is null", only_sample(routes_digest=None)),
    Case(
        "| `routes_digest` | string |", "routes_digest is '0000", only_row(routes_digest=A_DIGEST)
    ),
    Case("| `rows_valid` | int32 |", "valid rows, but its", sample(rows_valid=1)),
    Case("| `rows_valid` | int32 |", "rows_valid is 1", only_row(rows_valid=1)),
    Case("| `rows_total` | int32 |", "rows_total 99, but its tokens", sample(rows_total=99)),
    Case(
        "| `branch_of` | string |", "branch_of 000000/0/1, expected", sample(branch_of="000000/0/1")
    ),
    Case(
        "| `segments` | list of (row, tokens), both int32 |",
        "segments is null",
        only_sample(segments=None),
    ),
    Case(
        "| `segments` | list of (row, tokens), both int32 |",
        "name row 99",
        sample(segments=[{"row": 99, "tokens": 1}]),
    ),
    Case(
        "| `prompt_tokens`, `response_tokens` | list of uint32 |",
        "its tokens have digest",
        only_sample(prompt_tokens=[1] * 7),
    ),
    Case(
        "| `loss_mask` | list of bool |", "values of loss_mask", only_sample(loss_mask=[True] * 99)
    ),
    Case("| `logprobs` | list of float |", "values of logprobs", only_sample(logprobs=[-1.0] * 99)),
    Case(
        "| `logprobs` | list of float |",
        "infinite log-probs",
        lambda f: f.samples[0].update(logprobs=[float("-inf")] * len(f.samples[0]["logprobs"])),
    ),
    Case("| `finish_reason` | string |", "U\\+0007", only_sample(finish_reason="\a")),
    Case("| `version_spans` |", "do not cover", only_sample(version_spans=[])),
    Case(
        "| `version_spans` |",
        "do not cover",
        only_sample(version_spans=[{"version": 0, "start": 1, "end": 2}]),
    ),
    Case("| `seed` | int64 |", "seed: -2, expected -1", only_sample(seed=-2)),
    Case(
        "| `extras` | string |", "extras of type list, expected an object", only_sample(extras="[]")
    ),
    Case("| `extras` | string |", "invalid JSON in extras", only_sample(extras="{")),
    Case("| `extras` | string |", "twice", only_sample(extras='{"a": 1, "a": 2}')),
]

ROUTES = [
    Case("| `owner` | string |", "a segment of 000009/9", segment(owner="000009/9")),
    Case("| `token_start` | int32 |", "position|token_start", segment(token_start=1)),
    Case("| `token_start` | int32 |", "token_start -1", segment(token_start=-1)),
    Case("| `tokens` | int32 |", "expected 99 rows of 4", segment(tokens=99)),
    Case("| `tokens` | int32 |", "-1 tokens|tokens -1", segment(tokens=-1)),
    Case("| `tokens` | int32 |", "tokens 0, expected 1", zero_tokens),
    Case(
        "the sample takes the first\n`tokens` positions (at least one) of row `row`",
        "0 tokens (of|from) a segment",
        lambda f: f.sample(segments=[{"row": 0, "tokens": 0}, *f.samples[0]["segments"]]),
    ),
    Case(
        "| `owner` | string |",
        "a segment of 000009/9, which is not in its shard",
        lambda f: f.segments.append({**f.segments[0], "owner": "000009/9"}),
    ),
    Case("| `validity` | binary |", "bytes of validity", segment(validity=b"\xff" * 9)),
    Case("| `validity` | binary |", "unused bits", unused_bit),
    Case(
        "| `layer_00003`, ... | binary |",
        "no column layer_00002",
        of_file("routes", lambda file: file.without("layer_00002")),
    ),
    Case(
        "| `layer_00003`, ... | binary |",
        "column layer_00009, but the geometry in its commit",
        more_columns("routes", "layer_00009", pa.binary()),
    ),
    Case("stored as 0..K-1 in every layer", "a row that is not valid contains", invalid_row),
    Case("All ids must be less than E", "expected 0..15", coded(lambda data: b"\xff" * len(data))),
    Case(
        "A reader must refuse a row of\nids",
        "expected ascending",
        metadata("routes", coding="ids-uint8"),
    ),
    Case(
        "each once and in order: the first segment begins at `token_start` 0",
        "rows of routes|position",
        lambda f: f.sample(segments=f.samples[0]["segments"][:1]),
    ),
    Case(
        "A segment's owner is\nthe sample, its group",
        "a segment of",
        lambda f: f.sample(segments=[{"row": len(f.segments) - 1, "tokens": 1}]),
    ),
]

MANIFEST = [
    Case(
        "ordered by shard and, within a shard, by `id`",
        "are not in shard order",
        reversed_rows,
    ),
    Case(
        "ordered by shard and, within a shard, by `id`",
        "comes after",
        lambda f: f.rows.__setitem__(slice(0, 2), f.rows[1::-1]),
    ),
    Case("| `samples` | (file, row), both int32 |", "two rows for one sample", twice),
    Case(
        "| `samples` | (file, row), both int32 |",
        "refers to file 9, but data lists 4 files",
        only_row(samples={"file": 9, "row": 0}),
    ),
    Case(
        "| `samples` | (file, row), both int32 |",
        "which has a different role",
        lambda f: f.rows[0].update(samples={"file": f.rows[0]["routes"][0]["file"], "row": 0}),
    ),
    Case(
        "| `samples` | (file, row), both int32 |",
        "row 99 of",
        lambda f: f.rows[0]["samples"].update(row=99),
    ),
    Case(
        "| `routes` | list of (file, segments) |",
        "segments is",
        lambda f: f.rows[0]["routes"][0].update(segments=f.rows[1]["routes"][0]["segments"]),
    ),
    Case("| `routes` | list of (file, segments) |", "no routes", only_row(routes=None)),
    Case("| `routes` | list of (file, segments) |", "but .* has routes", without_routes),
    Case("| `routes` | list of (file, segments) |", "use routes from", another_shards_routes),
    Case("| `routes` | list of (file, segments) |", "no routes", only_row(routes=[])),
    Case(
        "| `routes` | list of (file, segments) |",
        "several parts",
        lambda f: f.rows[0].update(routes=f.rows[0]["routes"] * 2),
    ),
    Case(
        "| `part_digests` | list of string |",
        "part_digests",
        only_row(part_digests=[A_DIGEST, A_DIGEST]),
    ),
    Case("| `not_trained` | string |", "no reward, but not_trained is null", sample(reward=None)),
    Case("| `not_trained` | string |", "it has a reward", only_row(not_trained="no reward")),
]

COMMITS = [
    Case("| `rollout/SSSSS.json` |", "'step': 1.*expected", shard(step=1)),
    Case("| `rollout/SSSSS.json` |", "shard=1", shard(shard=1)),
    Case(
        "| `rollout/SSSSS.<write-id>.samples.parquet` |",
        "it names .*expected",
        renamed("samples", "00000.", "00009."),
    ),
    Case(
        "| `rollout/SSSSS.<write-id>.routes.parquet` |",
        "it names .*expected",
        renamed("routes", ".routes.", ".other."),
    ),
    Case(
        "| `manifest.<write-id>.parquet` |",
        "it names .*expected",
        renamed("manifest", "manifest.", "manifold."),
    ),
    Case(
        "`<write-id>` is eight random lower-case hexadecimal\ndigits",
        "expected a write id",
        shard(attempt="ABC"),
    ),
    Case("| `format` |", "format version '1'", shard(format="1")),
    Case("| `geometry`, `provenance` |", "go together", shard(provenance=None)),
    Case(
        "| `geometry`, `provenance` |",
        "its routes have kind R3 and policy version 1, but .* kind R3 and policy version 0",
        head(provenance={"kind": "R3", "policy_version": 1, "engine": "vllm 0.32.0"}),
    ),
    Case(
        "| `geometry`, `provenance` |",
        "its engine is 'other'",
        head(provenance={"kind": "R3", "policy_version": 0, "engine": "other"}),
    ),
    Case(
        "| `geometry`, `provenance` |",
        "layers \\[1, 2\\], but its files",
        head(geometry={"experts": 16, "topk": 4, "layers": [1, 2]}),
    ),
    Case("| `policies` |", r'policies \[\{"version": 0, "weights_sha256": "aaa', other_version),
    Case("| `policies` |", "tokens from policy version 0", unlisted_version),
    Case(
        "| `files` |",
        "0 files of role routes",
        lambda f: f.shards[0].files.remove(f.shards[0].file("routes")),
    ),
    Case(
        "| `files` |",
        "2 files of role samples|lists a file twice",
        lambda f: f.shards[0].files.append(f.shards[0].file("samples")),
    ),
    Case(
        "| `content_sha256` |",
        "no content_sha256",
        lambda f: f.others.update({"steps/000001/manifest.json": b'{"format": "1.1"}'}),
    ),
    Case("| `attempt` |", "expected a write id", head(attempt=None)),
    Case("`3.0` instead of `3`", r"\[?'step': 0\.0", shard(step=0.0)),
    Case("`3.0` instead of `3`", r"'step': 0\.0", head(step=0.0)),
    Case("`3.0` instead of `3`", "4.0 samples", lambda f: shard(samples=len(f.samples) + 0.0)(f)),
    Case("`3.0` instead of `3`", "counts", lambda f: counted(samples=len(f.rows) + 0.0)(f)),
    Case("| `step`, `shard` |", "shard=True", shard(shard=True)),
    Case("| `samples` | in a rollout shard", "7 samples", shard(samples=7)),
    Case("| `maker` |", "expected an object", shard(maker=[])),
    Case(
        "| `step` | the step's number |", "expected step 0|expected \\{'step': 0\\}", head(step=1)
    ),
    Case("| `policy_versions` |", "its samples have \\[0\\]", head(policy_versions=[0, 1])),
    Case("| `policy_versions` |", "its samples have \\[0\\]", head(policy_versions=[])),
    Case(
        "| `rejected` |",
        "rejected group 000000/9",
        head(rejected=[{"group": "000000/9", "reason": "alike", "samples": 2}]),
    ),
    Case(
        "| `rejected` |",
        "rejected group 000000/9: no shard has a sample",
        head(rejected=[{"group": "000000/9", "reason": "alike", "samples": 0}]),
    ),
    Case(
        "| `rejected` |",
        "rejected group 000000/0: its samples have rows",
        head(rejected=[{"group": "000000/0", "reason": "alike", "samples": 2}]),
    ),
    Case(
        "| `rejected` |",
        "rejected group 000000/0: found 3 samples, expected the 2 samples",
        head(rejected=[{"group": "000000/0", "reason": "alike", "samples": 3}]),
    ),
    Case(
        "Each rejected group is listed once",
        "a rejected group is listed twice",
        rejected_twice,
    ),
    Case("| `counts` |", "counts", counted(samples=7)),
    Case("| `counts` |", "counts", counted(tokens=7)),
    Case("| `counts` |", "counts", counted(rows_total=7)),
    Case("| `counts` |", "counts", counted(rows_valid=7)),
    Case("| `counts` |", "counts", head(counts=None)),
    Case("| `data` |", "no row refers to it|twice", unused_file),
    Case(
        "A reader must refuse any other key",
        "relative parts are not allowed",
        lambda f: f.manifest.body["data"][0].update(key="steps/../x.parquet"),
    ),
    Case("| `data` |", "which has a different role", swapped_data),
    Case(
        "Every sample of every shard is either in a row of the manifest or in a group in",
        "have no rows and are not rejected",
        dropped_row,
    ),
    Case(
        "Every sample of every shard is either in a row of the manifest or in a group in",
        "it does not name the shards: steps/",
        dropped_shard,
    ),
    Case(
        "The shards of a step are numbered from 0",
        "it does not name the shards: steps/",
        dropped_shard,
    ),
    Case(
        "The\n`policies` of a manifest are those of all its shards together",
        "policies",
        head(policies=[]),
    ),
    Case(
        "| `footer` |",
        "footer",
        described("routes", lambda entry: entry["footer"].__setitem__(0, entry["footer"][0] - 1)),
    ),
    Case("| `leaves` |", "its commit lists", described("samples", reordered)),
    Case(
        "| `row_groups` |",
        "its row groups have",
        described("samples", lambda entry: entry["row_groups"][0].update(rows=2)),
    ),
    Case("| `row_groups` |", "bytes at offset|digest", described("samples", shifted)),
    Case(
        "whole-file and range digests\nagree",
        "wrong digest in|its commit records",
        described("samples", another_digest),
    ),
    Case(
        "whole-file and range digests\nagree",
        "wrong digest in|its commit records",
        described("routes", another_digest),
    ),
    Case(
        "| `pruned.json` |",
        "expected step 0 with the field data",
        lambda f: f.others.update({keys.pruned(0): SIGNED}),
    ),
]

READING = [
    Case(
        "compare `content_sha256` of every commit with the commit's content",
        "digest|content",
        lambda f: f.others.update({f.shards[0].key: SIGNED[:-2] + b'0"}'}),
    ),
    Case(
        "each `commit_sha256` in the manifest with\n  the commit's `content_sha256`",
        "content",
        other_content,
    ),
    Case(
        "before it decodes a complete data file or a fetched range, compare the SHA-256",
        "SHA-256 [0-9a-f]{16}",
        flipped_bit,
    ),
    Case("refuse a different major version in `format`", "2.0 is newer", shard(format="2.0")),
    Case("a version that is not two numbers", "format version '1.1.1'", head(format="1.1.1")),
    Case(
        "refuse a coding that it does not know, or",
        "unknown coding 'bitmap'",
        metadata("routes", coding="bitmap"),
    ),
    Case(
        "refuse a file that lacks a column of its version",
        "no column seed",
        of_file("samples", lambda file: file.without("seed")),
    ),
    Case(
        "compare the role and geometry of a file with those in its commit",
        "a routes file, expected samples",
        metadata("samples", role="routes"),
    ),
    Case(
        "compare the role and geometry of a file with those in its commit",
        "as in its commit|its commit records",
        metadata("routes", geometry='{"experts": 17, "topk": 4, "layers": [1, 2, 5]}'),
    ),
    Case("refuse a coded column of the wrong length", "coded bytes", coded(lambda data: data[1:])),
    Case("ids that are not less than E", "expected 0..15", coded(lambda data: b"\xff" * len(data))),
    Case("or do not ascend", "expected ascending ids", metadata("routes", coding="ids-uint8")),
    Case("a `validity` of the wrong", "bytes of validity", segment(validity=b"\xff" * 9)),
    Case(
        "more tokens than the segment has",
        "tokens from a segment",
        lambda f: f.sample(segments=[{"row": 0, "tokens": 99}]),
    ),
    Case(
        "a segment with the wrong owner",
        "a segment of",
        lambda f: f.sample(segments=[{"row": len(f.segments) - 1, "tokens": 1}]),
    ),
    Case(
        "positions are not 0..S-2, each once",
        "rows of routes, expected",
        lambda f: f.sample(segments=f.samples[0]["segments"][:1]),
    ),
    Case(
        "finish reasons, the engine's name, and the reasons",
        r"sample 000000/0/0: not_trained: .* contains U\+000A",
        only_row(not_trained="a\nb"),
    ),
    *(
        Case("must refuse an empty `id`, `group`", f"{name}: empty", sample(**{name: ""}))
        for name in ("group", "prompt_id", "branch_of")
    ),
    Case("with the lengths of the lists", "rows_total 99, but its tokens", sample(rows_total=99)),
    Case("the columns that a manifest's row repeats", "reward is", only_row(reward=9.0)),
    Case(
        "refuse a column whose physical or logical type",
        "rows_total is INT64, expected INT32",
        typed("samples", "rows_total", pa.int64()),
    ),
    *(
        Case("refuse a sample whose values are outside the [limits]", says, forge)
        for says, forge in (
            ("infinite log-probs", infinite),
            ("seed: -2", only_sample(seed=-2)),
            ("reward nan", sample(reward=float("nan"))),
            ("1100 bytes of UTF-8", only_sample(finish_reason="x" * 1_100)),
            ("bytes of UTF-8", only_sample(extras=json.dumps({"a": "x" * 1_100_000}))),
        )
    ),
    Case(
        "compare the token digest with the tokens",
        "its tokens have digest",
        sample(token_digest=A_DIGEST),
    ),
    Case(
        "compare the routes digest with the routes, if it has read all layers",
        "its routes have digest",
        sample(routes_digest=A_DIGEST),
    ),
]

CASES = [*IDENTITY, *BRANCHES, *LIMITS, *PARQUET, *SAMPLES, *ROUTES, *MANIFEST, *COMMITS, *READING]

_RECORDED = "tests/unit/traces/test_recorded_sets.py"
_CUT = "tests/unit/traces/read/test_cut_rows.py"
_R2 = "tests/unit/traces/test_damage.py"
_TRAINING = "tests/unit/traces/read/test_training.py"
_OLD = "tests/unit/traces/format/test_schema.py"
_OTHERS = "tests/unit/upkeep/test_other_writers.py"
_NEWER = "tests/unit/upkeep/test_newer_stores.py"
_PAGE = "tests/unit/traces/format/test_format_doc.py"
_PLANES = "tests/unit/traces/read/test_planes.py"

ELSEWHERE = {
    "A reader that joins the routes of\na sample with tokens from elsewhere": _RECORDED,
    "| page indexes and bloom filters |": _OTHERS,
    "| statistics of column chunks |": _OTHERS,
    "| `training/SSS-DDDDD[-CCCCC].<write-id>.routes.parquet` |": _OTHERS,
    "| `manifest.json` | seals the step": "tests/unit/traces/test_damage.py",
    "| `replay/...` |": _RECORDED,
    "Objects are created once and never changed": "tests/store_conformance.py",
    "| number of tokens S in a sample |": "tests/unit/traces/test_compressible.py",
    "| number of version spans in a sample |": "tests/unit/traces/test_compressible.py",
    "| {3, 7, 8, 20}, {0, 1, 2, 3} | 64 |": _PAGE,
    "| {5, 300, 301}, {0, 256, 511} | 512 |": _PAGE,
    "Without compression, ids of segments": "tests/unit/traces/write/test_compression.py",
    "| the codings of ids and planes |": "tests/unit/traces/format/test_codec.py",
    "| {3, 7, 8, 20}, {0, 1, 2, 3} and {1, 2, 4, 9} | 64 |": _PAGE,
    "| {5, 300, 301}, {0, 256, 511} and {0, 1, 2} | 512 |": _PAGE,
    "The values of its other segments have no bytes": _PLANES,
    "planes that are not in the first segment of a row group": _PLANES,
    "The number of bytes per gap depends on E, never": "tests/unit/traces/format/test_codec.py",
    "| `step`, `stage`, `dp_rank` |": _R2,
    "A reader refuses every other\nencoding": "tests/unit/run/test_strict_json.py",
    "The file's columns are\nthe stage's layers": _TRAINING,
    "Each segment is owned by the sample whose rows it contains": _TRAINING,
    "A reader of\n`training.json` must": _TRAINING,
    "Creation must be atomic and must fail if the object exists": "tests/store_conformance.py",
    "A writer must perform the same checks as a reader": "tests/unit/traces/write/test_writer.py",
    "A reader of 1.x reads every earlier 1.y": "tests/unit/traces/test_format_1_0.py",
    "It reads every later 1.y correctly, or refuses": "tests/unit/traces/test_format_1_0.py",
    "It must refuse every other major version": _OLD,
    "A commit and the files that\nit lists have the same version": _NEWER,
    "| columns `branch_of`, `part_digests`, `not_trained` |": _OLD,
    "| `training.json`; `manifest_sha256`": "tests/unit/traces/test_format_1_0.py",
    "| `training`, `rejected` of a manifest |": "tests/unit/traces/format/test_policies.py",
    "never use a row that is not valid": "tests/integration/training_replay",
    "It never guesses the name": "tests/unit/traces/format/test_independent_writer.py",
    "| number of samples in a step |": "tests/unit/traces/write/test_domain.py",
    "A writer must form ids in this way": "tests/unit/traces/write/test_domain.py",
    "but refuses characters that must not reach": "tests/unit/traces/write/test_domain.py",
    "| `id`, `group`, `prompt_id`, `branch_of`": "tests/unit/traces/write/test_domain.py",
    "| `reward_error`; `extras` as JSON |": "tests/unit/traces/write/test_domain.py",
    "| `training/SSS-DDDDD[-CCCCC].<write-id>.json` |": _OTHERS,
    "| `training.json` | names": _TRAINING,
    "| `cp_rank` |": _TRAINING,
    "| `manifest_sha256` |": _TRAINING,
    "| `digests` | one": _TRAINING,
    "| `step`, `manifest_sha256` |": _TRAINING,
    "| `geometry`, `provenance`, `policies` | of all parts": _TRAINING,
    "| `files` | `[]` |": _TRAINING,
    "| `commits` | the parts": _TRAINING,
    "| `counts` | `samples`, `rows_total` and": _TRAINING,
    "A row must be valid in all layers or in none": _TRAINING,
    "A writer must not create `training.json` unless the parts contain every sample": _TRAINING,
    "must refuse a step that has": _TRAINING,
    "refuse a `training.json` in a step with `training: false`": _TRAINING,
    "refuse `training.json`, and parts that it names, in format 1.0": _TRAINING,
    "refuse parts whose E, K, kind or policy version differs": _TRAINING,
    "refuse parts whose layers together are not those": _TRAINING,
    "refuse a geometry in `training.json` that differs from the one in": _TRAINING,
    "refuse policies that name different weights": _TRAINING,
    "refuse an `engine` in `training.json` that no part has": _TRAINING,
    "refuse the set unless, in each layer, its parts together": _TRAINING,
    "refuse a sample whose validity differs between layers": _TRAINING,
    "compare `step` and `manifest_sha256` of `training.json` and of each part": _TRAINING,
    "compare every token digest with the one in the manifest, and `rows` and": _TRAINING,
    "compare a sample's routes digest in a part with the sample's rows": _TRAINING,
    "a sample's segments are in the file in the order of their positions": _NEWER,
    "Neither a reader nor `verify` notices this in a run": _NEWER,
    "The list\ncontains the tensors of all safetensors": "tests/unit/policies/test_weights.py",
    "Row groups therefore stay within the bounds": "tests/unit/traces/format/test_pages.py",
    "A reader cannot detect that the folder contains files": "tests/unit/traces/test_format_1_0.py",
    "every\nsample once in every layer that occurs": "tests/unit/traces/test_format_1_0.py",
}
"""Statements that need more than one sealed step, each with the file that tests it."""

FREE = {
    "Dense layers never appear": "a file does not record which layers of a model are "
    "dense; verify compares the geometry with the model "
    "(tests/unit/upkeep/test_verify.py)",
    "A row that is not valid is never left out": "S - 1 rows are required; a writer that left one "
    "out and moved the others cannot be distinguished from one that recorded wrong routes",
    "A manifest has no rows for rejected samples": "nothing to detect; the hostile campaign lists "
    "these columns (tests/hostile/known.py)",
    "| step | 0 to 999,999 |": "an object of step 1,000,000 has no key",
    "| number of tokens in a segment or row group": "a rule for writers that no reader may enforce",
    "| compression |": "a reader accepts any compression",
    "| encodings |": "a reader accepts any encoding",
    "| pages |": "any page layout is correct",
    "| row groups | any number": "any number is correct",
    "Engines usually, but not always, route the prompt": "an observation",
    "A reader must": "the list below states each rule",
    "Only this list and the other sentences about what a reader must do": "the rules themselves "
    "have cases",
    "A minor version must not change the definitions": "a rule for the next version of the page",
    "| `training` | true": "only the run's settings show whether the trainer was to "
    "record; the consequences are tested with the sets (R2)",
    "| shard, data-parallel and context-parallel rank |": "other numbers have no key",
    "| pipeline stage |": "other numbers have no key",
}
"""Statements that no stored data can break, or that no reader may enforce, with the reason."""
