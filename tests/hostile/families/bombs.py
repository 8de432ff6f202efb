"""Small objects that claim large contents: pages, footers, counts, texts."""

import json
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from tests.hostile.case import FREE, NAMED, Case, Changes, title
from tests.hostile.parquet import rewritten, table_of, with_metadata, with_values, written
from tests.hostile.remake import remade, text
from tests.hostile.worlds import world

_ROWS = 20_000_000
_LONG = 200


def _column_of(values: pa.Array, table: pa.Table, name: str) -> bytes:
    """Return the file with one column replaced by millions of rows that take up almost no space.

    The other columns repeat their first value.
    """
    columns = {}
    for field in table.schema:
        if field.name == name:
            columns[field.name] = values
        else:
            first = table[field.name].combine_chunks()[:1]
            index = pa.array(np.zeros(len(values), np.int8))
            columns[field.name] = (
                pa.nulls(len(values), field.type)
                if first.null_count
                else (
                    pa.DictionaryArray.from_arrays(index, first)
                    if (pa.types.is_string(field.type) or pa.types.is_binary(field.type))
                    else first.take(pa.array(np.zeros(len(values), np.int8)))
                )
            )
    large = pa.table(columns).replace_schema_metadata(table.schema.metadata)
    return written(large, [len(values)])


def _many_rows(data: bytes, name: str) -> bytes:
    """Replace a column with millions of rows of one long text, stored once in a dictionary page."""
    index = pa.array(np.zeros(_ROWS // 10, np.int8))
    text_ = pa.array(["x" * _LONG * 10])
    return _column_of(pa.DictionaryArray.from_arrays(index, text_), table_of(data), name)


def _long_value(data: bytes, name: str) -> bytes | None:
    """Replace a column's first value with 400 MB of zeros, which zstd compresses to a few bytes."""

    def change(table: pa.Table) -> pa.Table:
        values = table[name].to_pylist()
        values[0] = bytes(400 << 20)
        return with_values(table, name, values, pa.binary())

    return rewritten(data, change)


def _long_list(data: bytes, name: str) -> bytes | None:
    """Replace a column's first list with 60 million zeros."""

    def change(table: pa.Table) -> pa.Table:
        kind = table.schema.field(name).type
        old = table[name].combine_chunks()
        first = pa.array(np.zeros(60_000_000, np.uint32)).cast(kind.value_type)
        lists = pa.ListArray.from_arrays(pa.array([0, len(first)], pa.int32()), first)
        column = pa.chunked_array([lists.cast(kind), old[1:]])
        return table.set_column(table.schema.get_field_index(name), name, column)

    return rewritten(data, change)


def _claimed(data: bytes, name: str, claim: int) -> bytes | None:
    """Make the first row claim more tokens than its other columns contain."""

    def change(table: pa.Table) -> pa.Table:
        values = table[name].to_pylist()
        values[0] = claim
        return with_values(table, name, values, table.schema.field(name).type)

    return rewritten(data, change)


def _wide_footer(data: bytes) -> bytes | None:
    """Add 100 MB of metadata to the footer."""
    long = {b"retrace.long": b"x" * (100 << 20)}
    return rewritten(data, lambda table: with_metadata(table, long))


def _many_columns(data: bytes) -> bytes | None:
    """Add twenty thousand unknown columns."""

    def change(table: pa.Table) -> pa.Table:
        more = [f"c{number}" for number in range(20_000)]
        columns = [*table.columns, *[pa.nulls(len(table), pa.int8())] * len(more)]
        found = pa.table(columns, names=[*table.column_names, *more])
        return found.replace_schema_metadata(table.schema.metadata)

    return rewritten(data, change)


def _footer_length(data: bytes, length: int) -> bytes:
    return data[:-8] + length.to_bytes(4, "little") + data[-4:]


def _page_claims(data: bytes, factor: bytes) -> bytes:
    """Enlarge a page's claimed size by replacing the first bytes that look like such a size."""
    found = bytearray(data)
    at = found.find(b"\x15", 4)
    found[at : at + 6] = b"\x15" + factor
    return bytes(found)


BOMBS: dict[str, Callable[[bytes], bytes | None]] = {
    "footer of 2^31 bytes": lambda data: _footer_length(data, (1 << 31) - 1),
    "footer of 2^32 bytes": lambda data: _footer_length(data, (1 << 32) - 1),
    "footer of 0 bytes": lambda data: _footer_length(data, 0),
    "metadata of 100 MB": _wide_footer,
    "20,000 columns": _many_columns,
    "page of 2^31 bytes": lambda data: _page_claims(data, b"\xfe\xff\xff\xff\x0f"),
}
_IGNORED = ("20,000 columns", "metadata of 100 MB")
"""Bombs that readers ignore, because later versions of the format may add columns and metadata."""
_COLUMNS: dict[str, dict[str, Callable[[bytes, str], bytes | None]]] = {
    "samples": {
        "id:2,000,000 long texts": lambda data, _: _many_rows(data, "id"),
        "prompt_tokens:60,000,000": lambda data, _: _long_list(data, "prompt_tokens"),
        "logprobs:60,000,000": lambda data, _: _long_list(data, "logprobs"),
        "rows_total:2^31-1": lambda data, _: _claimed(data, "rows_total", 2**31 - 1),
        "response_length:300,000,000": lambda data, _: _claimed(
            data, "response_length", 300_000_000
        ),
    },
    "routes": {
        "owner:2,000,000 long texts": lambda data, _: _many_rows(data, "owner"),
        "tokens:300,000,000": lambda data, _: _claimed(data, "tokens", 300_000_000),
        "tokens:2^31-1": lambda data, _: _claimed(data, "tokens", 2**31 - 1),
        "token_start:2^31-1": lambda data, _: _claimed(data, "token_start", 2**31 - 1),
        "layer:400 MB": lambda data, layer: _long_value(data, layer),
        "validity:400 MB": lambda data, _: _long_value(data, "validity"),
    },
    "manifest": {
        "id:2,000,000 long texts": lambda data, _: _many_rows(data, "id"),
        "rows_total:300,000,000": lambda data, _: _claimed(data, "rows_total", 300_000_000),
        "prompt_length:300,000,000": lambda data, _: _claimed(data, "prompt_length", 300_000_000),
    },
}


def cases(name: str) -> Iterator[Case]:
    """Yield cases that put each claim into a file of each role, and large claims into commits.

    All digests are recomputed.
    """
    by_role: dict[str, str] = {}
    for key in sorted(world(name)):
        if key.endswith(".parquet") and key.startswith("steps/"):
            role = key.split(".")[-2]
            by_role.setdefault(role if role in _COLUMNS else "manifest", key)
    for role, key in by_role.items():
        for what, bomb in BOMBS.items():
            yield Case(
                f"bombs/{name}:{title(key)}/{what}/L1",
                name,
                lambda key=key, bomb=bomb: _changed(name, key, bomb),
                FREE if what in _IGNORED else NAMED,
            )
        layers = [n for n in table_of(world(name)[key]).column_names if n.startswith("layer_")]
        for what, claim in _COLUMNS[role].items():
            yield Case(
                f"bombs/{name}:{title(key)}/{what}/L1",
                name,
                lambda key=key, claim=claim, layer=(layers or [""])[0]: _changed(
                    name, key, lambda data: claim(data, layer)
                ),
            )
        yield Case(
            f"bombs/{name}:{title(key)}/a commit of 300,000 row groups/L1",
            name,
            lambda key=key: _row_groups(name, key),
        )
        yield Case(
            f"bombs/{name}:{title(key)}/2^40 rows in its commit/L1",
            name,
            lambda key=key: _row_groups(name, key, 1 << 40),
        )


def _changed(name: str, key: str, bomb: Callable[[bytes], bytes | None]) -> Changes | None:
    objects = world(name)
    new = bomb(objects[key])
    return None if new is None else remade(objects, {key: new})


def _row_groups(name: str, key: str, rows: int | None = None) -> Changes | None:
    """Make a file's entry in its commit claim more row groups, or rows, than the file contains."""
    objects = world(name)
    for commit, data in sorted(objects.items()):
        if commit.endswith(".json") and f'"{key}"'.encode() in data:
            body = json.loads(data)
            for file in body.get("files", []):
                if file.get("key") == key and "row_groups" in file:
                    if rows is None:
                        file["row_groups"] = file["row_groups"][:1] * 300_000
                    else:
                        file["row_groups"][0]["rows"] = rows
                    return dict(remade(objects, {commit: text(body)}))
    return None
