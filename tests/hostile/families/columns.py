"""Every column of every Parquet file with different values, types, counts and metadata."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from tests.hostile.case import HARMLESS, NAMED, Case, Changes, title
from tests.hostile.parquet import rewritten, table_of, with_metadata, with_values
from tests.hostile.remake import remade
from tests.hostile.worlds import WITH_TWINS, twin, world

Values = list[Any]
Column = Callable[[pa.Table, str], pa.Table | None]


def _each(change: Callable[[Any], Any], some: slice = slice(0, 1)) -> Column:
    """Change the values in some rows; by default, only in the first row that the change affects."""

    def column(table: pa.Table, name: str) -> pa.Table | None:
        values = table[name].to_pylist()
        at = [i for i, old in enumerate(values) if change(copy.deepcopy(old)) != old][some]
        for i in at:
            values[i] = change(values[i])
        return with_values(table, name, values, table.schema.field(name).type) if at else None

    return column


def _all(change: Callable[[Any], Any]) -> Column:
    return _each(change, slice(None))


def _leaves(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Apply a change to the values inside lists and groups."""

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: changed(inner) for name, inner in value.items()}
        return [changed(inner) for inner in value] if isinstance(value, list) else change(value)

    return changed


def _zero(value: Any) -> Any:
    if isinstance(value, bool | int | float):
        return type(value)(0)
    if isinstance(value, bytes):
        return bytes(len(value))
    return "" if isinstance(value, str) else value


def _more(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, bytes) and value:
        return bytes([value[0] ^ 1]) + value[1:]
    return value + "0" if isinstance(value, str) else value


def _less(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value - 1
    return value[:-1] if isinstance(value, bytes | str) else value


def _most(value: Any) -> Any:
    return 2**31 - 1 if isinstance(value, int) and not isinstance(value, bool) else value


def _text(to: str) -> Callable[[Any], Any]:
    return lambda value: to if isinstance(value, str) else value


def _other_row(table: pa.Table, name: str) -> pa.Table | None:
    values = table[name].to_pylist()
    other = next((i for i, value in enumerate(values) if value != values[0]), None)
    if other is None:
        return None
    values[0] = values[other]
    return with_values(table, name, values, table.schema.field(name).type)


def _moved_on(table: pa.Table, name: str) -> pa.Table | None:
    """Give each row the value of the next row."""
    values = table[name].to_pylist()
    return with_values(table, name, [*values[1:], values[0]], table.schema.field(name).type)


def _typed(kind_of: Callable[[pa.DataType], pa.DataType | None]) -> Column:
    def column(table: pa.Table, name: str) -> pa.Table | None:
        kind = kind_of(table.schema.field(name).type)
        if kind is None or kind == table.schema.field(name).type:
            return None
        values = table[name].to_pylist()
        if pa.types.is_string(kind):
            values = [None if value is None else str(value) for value in values]
        return with_values(table, name, values, kind)

    return column


def _wider(kind: pa.DataType) -> pa.DataType | None:
    if pa.types.is_list(kind):
        inner = _wider(kind.value_type)
        return None if inner is None else pa.list_(inner)
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _wider(field.type) or field.type) for field in kind])
    wider = {pa.int32(): pa.int64(), pa.uint32(): pa.int64(), pa.float32(): pa.float64()}
    wider |= {pa.string(): pa.binary(), pa.binary(): pa.string(), pa.int64(): pa.float64()}
    wider |= {pa.float64(): pa.float32(), pa.bool_(): pa.int32()}
    return wider.get(kind)


def _narrower(kind: pa.DataType) -> pa.DataType | None:
    if pa.types.is_list(kind):
        inner = _narrower(kind.value_type)
        return None if inner is None else pa.list_(inner)
    return {pa.int32(): pa.int16(), pa.uint32(): pa.int32(), pa.int64(): pa.uint64()}.get(kind)


def _twice(table: pa.Table, name: str) -> pa.Table:
    """Repeat the column with its values shifted by one row."""
    values = table[name].to_pylist()
    again = pa.array([*values[1:], *values[:1]], table.schema.field(name).type)
    return table.append_column(table.schema.field(name).with_nullable(True), again)


def _in_front(table: pa.Table, name: str) -> pa.Table:
    values = table[name].to_pylist()
    again = pa.array([*values[1:], *values[:1]], table.schema.field(name).type)
    return table.add_column(0, table.schema.field(name).with_nullable(True), again)


def _renamed(table: pa.Table, name: str) -> pa.Table:
    return table.rename_columns([n + "_" if n == name else n for n in table.column_names])


def _like_another(table: pa.Table, name: str) -> pa.Table | None:
    """Give the column the values of another column of the same type."""
    kind = table.schema.field(name).type
    others = [field.name for field in table.schema if field.type == kind and field.name != name]
    if not others:
        return None
    return with_values(table, name, table[others[0]].to_pylist(), kind)


def _doubled(value: Any) -> Any:
    return [*value, *value[-1:]] if isinstance(value, list) else value


def _shorter(value: Any) -> Any:
    return value[:-1] if isinstance(value, list) else value


def _reversed(value: Any) -> Any:
    return value[::-1] if isinstance(value, list) else value


def _number(to: float) -> Callable[[Any], Any]:
    return lambda value: to if isinstance(value, float) else value


CHANGES: dict[str, Column] = {
    "from another row": _other_row,
    "shifted by one row": _moved_on,
    "null": _each(lambda _: None),
    "all null": _all(lambda _: None),
    "inner null": _each(lambda value: [None, *value[1:]] if isinstance(value, list) else value),
    "zero": _each(_leaves(_zero)),
    "all zero": _all(_leaves(_zero)),
    "one more": _each(_leaves(_more)),
    "one less": _each(_leaves(_less)),
    "most": _each(_leaves(_most)),
    "least": _each(_leaves(lambda v: -(2**31) if _most(v) != v else v)),
    "not a number": _each(_leaves(_number(float("nan")))),
    "infinite": _each(_leaves(_number(float("inf")))),
    "empty": _each(lambda value: type(value)() if isinstance(value, list | str | bytes) else value),
    "last repeated": _each(_doubled),
    "last removed": _each(_shorter),
    "reversed": _each(_reversed),
    "control characters": _each(_text("\x1b[31mred\x1b[0m\n\0")),
    "very long": _each(_text("x" * 1_000_000)),
    "not JSON": _each(_text("{")),
    "JSON list": _each(_text("[1]")),
    "JSON NaN": _each(_text('{"a": NaN}')),
    "JSON key twice": _each(_text('{"a": 1, "a": 2}')),
    "deep JSON": _each(_text('{"a":' * 50_000 + "1" + "}" * 50_000)),
    "10^400 in JSON": _each(_text('{"a": 1' + "0" * 400 + "}")),
    "10^5000 in JSON": _each(_text('{"a": 1' + "0" * 5_000 + "}")),
    "wider type": _typed(_wider),
    "narrower type": _typed(_narrower),
    "as text": _typed(lambda _: pa.string()),
    "missing": lambda table, name: table.drop_columns([name]),
    "renamed": _renamed,
    "duplicated": _twice,
    "duplicated in front": _in_front,
    "another column's values": _like_another,
}

METADATA: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda _: None,
    "empty": lambda _: b"",
    "not UTF-8": lambda old: old + b"\xff",
    "NUL": lambda old: old + b"\0",
    "not JSON": lambda _: b"{",
    "null": lambda _: b"null",
    "deep": lambda _: b"[" * 100_000,
    "number": lambda _: b"3",
    "one more": lambda old: old.replace(b"1", b"2") if b"1" in old else None,
    "another role": lambda old: {b"routes": b"samples", b"samples": b"routes"}.get(old, b"routes"),
    "foreign digits": lambda old: old.replace(b"1", chr(0x661).encode()) if b"1" in old else None,
}
_PEOPLES = "retrace.producer"
"""A metadata key whose value may be any text."""
_NO_TEXT = ("missing", "not UTF-8")


def cases(name: str) -> Iterator[Case]:
    """Yield every change to every column and metadata entry in a world's files.

    All digests are recomputed.
    """
    for key, data in sorted(world(name).items()):
        if not key.endswith(".parquet") or key.startswith(("inputs/", "steps/000001/")):
            continue
        table = table_of(data)
        for column in table.column_names:
            where = f"columns/{name}:{title(key)}:{column}"
            for what in (*CHANGES, "another run's", "another run's of the same tokens"):
                yield Case(
                    f"{where}/{what}/L1",
                    name,
                    lambda key=key, column=column, what=what: _changed(name, key, column, what),
                )
        extra = f"columns/{name}:{title(key)}"
        yield Case(f"{extra}/extra/L1", name, lambda key=key: _extra(name, key), HARMLESS)
        metadata = [k.decode() for k in table.schema.metadata or {} if k.startswith(b"retrace.")]
        for entry in metadata:
            for what in METADATA:
                yield Case(
                    f"metadata/{name}:{title(key)}:{entry}/{what}/L1",
                    name,
                    lambda key=key, entry=entry, what=what: _other_metadata(name, key, entry, what),
                    HARMLESS if entry == _PEOPLES and what not in _NO_TEXT else NAMED,
                )


def _changed(name: str, key: str, column: str, what: str) -> Changes | None:
    objects = world(name)
    if what in CHANGES:
        new = rewritten(objects[key], lambda table: CHANGES[what](table, column))
    else:
        if name not in WITH_TWINS:
            return None
        other = twin(name, tokens=what == "another run's").get(key)
        if other is None:
            return None

        def of_twin(table: pa.Table) -> pa.Table:
            theirs = table_of(other)[column]
            return with_values(table, column, theirs.to_pylist(), theirs.type)

        new = rewritten(objects[key], of_twin)
    return None if new is None else remade(objects, {key: new})


def _extra(name: str, key: str) -> Changes | None:
    objects = world(name)

    def more(table: pa.Table) -> pa.Table:
        return table.append_column("router_scores", pa.array([[1.0]] * len(table)))

    new = rewritten(objects[key], more)
    return None if new is None else remade(objects, {key: new})


def _other_metadata(name: str, key: str, entry: str, what: str) -> Changes | None:
    objects = world(name)
    old = table_of(objects[key]).schema.metadata[entry.encode()]
    value = METADATA[what](old)
    if value == old:
        return None
    new = rewritten(objects[key], lambda table: with_metadata(table, {entry.encode(): value}))
    return None if new is None else remade(objects, {key: new})
