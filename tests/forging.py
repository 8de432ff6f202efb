"""A sealed step that tests can change and write again with new digests.

The result looks like the work of a broken writer, or of an attacker with knowledge of the format.
The sizes, ranges and digests of files and commits all match. The test sets the digests of tokens
and routes.
"""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.run import keys
from pipeline.run.commit import CONTENT_SHA256, DataFile, content_digest, sha256
from pipeline.traces.format.chunks import describe
from pipeline.traces.format.digests import token_digest
from tests.memory_store import MemoryStore


@dataclass
class ForgedFile:
    """A Parquet file whose content, encoding and entry in its commit can be changed."""

    key: str
    role: str
    rows: list[dict[str, Any]]
    schema: pa.Schema
    metadata: dict[str, str]
    options: dict[str, Any] = field(default_factory=lambda: {"compression": "zstd"})
    """Options for pq.ParquetWriter."""
    describing: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)
    """Functions that change the file's entry in its commit, after the entry was computed."""
    changed: Callable[[bytes], bytes] = bytes
    """Changes the written file, before its digests are computed."""
    empty_group: bool = False
    """Whether a row group without rows comes before the others."""

    def retyped(self, column: str, type_: pa.DataType) -> None:
        """Give a column a different type."""
        index = self.schema.get_field_index(column)
        self.schema = self.schema.set(index, pa.field(column, type_))

    def without(self, column: str) -> None:
        """Drop a column."""
        self.schema = self.schema.remove(self.schema.get_field_index(column))

    def written(self) -> tuple[bytes, dict[str, Any]]:
        """Return the file and its entry in a commit."""
        schema = self.schema.with_metadata(self.metadata)
        table = pa.Table.from_pylist(self.rows, schema)
        out = io.BytesIO()
        with pq.ParquetWriter(out, schema, **self.options) as writer:
            if self.empty_group:
                writer.write_table(schema.empty_table())
            writer.write_table(table)
        content = self.changed(out.getvalue())
        data = DataFile(self.key, len(content), sha256(content))
        entry = describe(content, data, self.role).to_json()
        for change in self.describing:
            change(entry)
        return content, entry


@dataclass
class ForgedCommit:
    """A commit object and its files."""

    key: str
    body: dict[str, Any]
    files: list[ForgedFile]

    def file(self, role: str) -> ForgedFile:
        """Return the file with the given role."""
        return next(file for file in self.files if file.role == role)


class Forgery:
    """A changeable copy of one step of a store in memory; the store itself stays unchanged."""

    def __init__(self, store: MemoryStore, step: int = 0) -> None:
        self._objects = dict(store.objects)
        self.shards = []
        for key in sorted(self._objects):
            if keys.commits_shard(key):
                self.shards.append(self._commit(key))
        self.manifest = self._commit(keys.manifest(step))
        self.others: dict[str, bytes | None] = {}
        """The contents of other objects to write, keyed by object key; None for an object to
        remove."""

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The rows of the first shard's samples file."""
        return self.shards[0].file("samples").rows

    @property
    def segments(self) -> list[dict[str, Any]]:
        """The rows of the first shard's routes file."""
        return self.shards[0].file("routes").rows

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the manifest."""
        return self.manifest.files[0].rows

    def sample(self, number: int = 0, **changes: Any) -> None:
        """Change a sample of the first shard and, in the same way, its row in the manifest."""
        sample = self.samples[number]
        (row,) = [row for row in self.rows if row["id"] == sample["id"]]
        sample.update(changes)
        row.update({name: value for name, value in changes.items() if name in row})
        if "segments" in changes:
            row["routes"] = [{**row["routes"][0], "segments": changes["segments"]}]

    def tokens(self, number: int = 0, **changes: Any) -> None:
        """Change a sample and recompute its token digest."""
        sample = {**self.samples[number], **changes}
        found = token_digest(sample["prompt_tokens"] + sample["response_tokens"])
        self.sample(number, token_digest=found, **changes)

    def sealed(self) -> MemoryStore:
        """Return a store with the changed step and recomputed digests."""
        store = MemoryStore(dict(self._objects))
        refs = {ref["key"]: ref for ref in self.manifest.body["data"]}
        for shard in self.shards:
            digest = self._put(store, shard)
            for entry in shard.body["files"]:
                if entry["key"] in refs:
                    refs[entry["key"]]["sha256"] = entry["sha256"]
            for ref in refs.values():
                if ref["commit"] == shard.key:
                    ref["commit_sha256"] = digest
        self._put(store, self.manifest)
        for key, data in self.others.items():
            store.objects.pop(key, None)
            if data is not None:
                store.objects[key] = data
        return store

    def _commit(self, key: str) -> ForgedCommit:
        body = json.loads(self._objects.pop(key))
        del body[CONTENT_SHA256]
        return ForgedCommit(key, body, [self._file(entry) for entry in body["files"]])

    def _file(self, entry: dict[str, Any]) -> ForgedFile:
        table = pq.read_table(io.BytesIO(self._objects.pop(entry["key"])))
        metadata = {
            name.decode(): value.decode()
            for name, value in (table.schema.metadata or {}).items()
            if name.startswith(b"retrace.")
        }
        fields = [pa.field(column.name, column.type) for column in table.schema]
        return ForgedFile(
            entry["key"], entry["role"], table.to_pylist(), pa.schema(fields), metadata
        )

    @staticmethod
    def _put(store: MemoryStore, commit: ForgedCommit) -> str:
        entries = []
        for file in commit.files:
            content, entry = file.written()
            store.objects[file.key] = content
            entries.append(entry)
        commit.body["files"] = entries
        digest = content_digest(commit.body)
        body = {**commit.body, CONTENT_SHA256: digest}
        store.objects[commit.key] = json.dumps(body).encode()
        return digest
