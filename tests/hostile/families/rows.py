"""Rows of manifests, samples and segments that are dropped, repeated or swapped."""

from collections.abc import Callable, Iterator

import pyarrow as pa

from tests.hostile.case import FREE, HARMLESS, NAMED, Case, Changes, title
from tests.hostile.parquet import rewritten, table_of
from tests.hostile.remake import remade
from tests.hostile.worlds import WITH_REJECTED, world


def _take(order: Callable[[list[int]], list[int]]) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.take(pa.array(order(list(range(len(table)))), pa.int64()))


def _but_a_group(table: pa.Table) -> pa.Table | None:
    if "group" not in table.column_names:
        return None
    groups = table["group"].to_pylist()
    return table.filter(pa.array([group != groups[0] for group in groups]))


def _ids_swapped(table: pa.Table) -> pa.Table | None:
    """Swap the ids of the first two rows that have different ids."""
    name = "id" if "id" in table.column_names else "owner"
    if name not in table.column_names:
        return None
    names = table[name].to_pylist()
    other = next((i for i, found in enumerate(names) if found != names[0]), None)
    if other is None:
        return None
    names[0], names[other] = names[other], names[0]
    return table.set_column(table.schema.get_field_index(name), name, pa.array(names))


ROWS: dict[str, Callable[[pa.Table], pa.Table | None]] = {
    "first dropped": _take(lambda rows: rows[1:]),
    "last dropped": _take(lambda rows: rows[:-1]),
    "middle dropped": _take(lambda rows: [*rows[: len(rows) // 2], *rows[len(rows) // 2 + 1 :]]),
    "a group dropped": _but_a_group,
    "all dropped": _take(lambda _: []),
    "first repeated": _take(lambda rows: [rows[0], *rows]),
    "last repeated at the front": _take(lambda rows: [rows[-1], *rows]),
    "first two swapped": _take(lambda rows: [*rows[1::-1], *rows[2:]]),
    "reversed": _take(lambda rows: rows[::-1]),
    "names of two swapped": _ids_swapped,
    "unchanged, by another writer": _take(lambda rows: rows),
}


def cases(name: str) -> Iterator[Case]:
    """Yield every change to the rows of each file in a world, with recomputed digests."""
    for key in sorted(world(name)):
        if not key.endswith(".parquet") or key.startswith("inputs/"):
            continue
        for what in ROWS:
            yield Case(
                f"rows/{name}:{title(key)}/{what}/L1",
                name,
                lambda key=key, what=what: _changed(name, key, what),
                _expected(name, key, what),
            )


def _expected(name: str, key: str, what: str) -> str:
    if what.startswith("unchanged"):
        return HARMLESS
    # The order of a validation's samples has no meaning, nor does the order of a trainer's
    # segments. Readers do not need to follow the order of a manifest. No manifest refers to the
    # rows of rejected samples.
    order = what in ("reversed", "first two swapped")
    free = "/manifest." in key or "validations/" in key or "/training/" in key
    shards = ("rollout/00001.", "rollout/00003.")
    rejected = name in WITH_REJECTED and ".samples." in key and any(s in key for s in shards)
    return FREE if order and (free or rejected) else NAMED


def _changed(name: str, key: str, what: str) -> Changes | None:
    objects = world(name)
    if what.startswith("unchanged"):
        table = table_of(objects[key])
        new = rewritten(
            objects[key],
            lambda _: table.replace_schema_metadata(
                {**(table.schema.metadata or {}), b"of another writer": b"yes"}
            ),
        )
    else:
        new = rewritten(objects[key], ROWS[what])
    return None if new is None else remade(objects, {key: new})
