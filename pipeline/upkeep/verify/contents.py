"""The part of `verify` that compares data files, read piece by piece, with their commits."""

import hashlib
from collections.abc import Iterator, Sequence

from pipeline.policies.weights import SUFFIX, TensorReader, read_stored_weights
from pipeline.run.commit import CorruptObjectError, DataFile
from pipeline.store import ObjectMissingError, Store
from pipeline.traces.format.chunks import Range, TraceFile
from pipeline.upkeep.problems import Report

_PIECE = 64 << 20  # bytes in memory at once


def verify_data(
    store: Store, file: DataFile, report: Report, commit: str, reader: TensorReader | None = None
) -> None:
    """Compare a data file's size and digest with those in its commit; read each file only once.

    Args:
        store: The run or recorded set.
        file: The data file.
        report: Receives problems. `report.weights` receives the tensors of complete safetensors
            files.
        commit: Key of the commit, for messages.
        reader: Receives the bytes of the tensors that it needs, even from incomplete files.
    """
    if file.key.endswith(SUFFIX):
        _verify_weights(store, file, report, commit, reader)
    else:
        _verify(store, file, (), report, commit)


def verify_file(store: Store, file: TraceFile, report: Report, commit: str) -> None:
    """Compare a trace file and each of its ranges with their digests; read each file only once.

    Args:
        store: The run or recorded set.
        file: The file as described in its commit.
        report: Receives problems.
        commit: Key of the commit, for messages.
    """
    _verify(store, file.data, file.ranges, report, commit)


def _verify_weights(
    store: Store, file: DataFile, report: Report, commit: str, reader: TensorReader | None
) -> None:
    if report.seen.get(file.key) == file:
        return
    report.seen[file.key] = file
    with report.noting(file.key):
        check_size(store, file, commit)
        try:
            report.weights[file.key] = read_stored_weights(store, file, reader)
        except CorruptObjectError:  # if it is not safetensors, the check of its policy reports this
            del report.seen[file.key]
            _verify(store, file, (), report, commit)


def check_size(store: Store, file: DataFile, commit: str) -> None:
    """Raise StoreError unless a file exists and has the size that its commit lists.

    Args:
        store: The run or recorded set.
        file: The data file.
        commit: Key of the commit, for messages.
    """
    size = store.size(file.key)
    if size is None:
        raise ObjectMissingError(f"{file.key}: no such object; {commit} names it")
    if size != file.size:
        raise CorruptObjectError(
            f"{file.key}: {size} bytes, expected {file.size} as in {commit}; restore the object"
        )


def refuse_whole(file: DataFile, digest: str, commit: str) -> None:
    """Raise CorruptObjectError unless a file, read in full, has the digest that its commit lists.

    Args:
        file: The data file.
        digest: The digest of the stored file.
        commit: Key of the commit, for messages.
    """
    if digest != file.sha256:
        raise CorruptObjectError(
            f"{file.key}: SHA-256 {digest[:16]}..., expected {file.sha256[:16]}... as in "
            f"{commit}; restore the object"
        )


def _verify(
    store: Store, file: DataFile, ranges: Sequence[Range], report: Report, commit: str
) -> None:
    if report.seen.get(file.key) == file:
        return
    report.seen[file.key] = file
    with report.noting(file.key):
        check_size(store, file, commit)
        whole = hashlib.sha256()
        parts = [hashlib.sha256() for _ in ranges]
        # Sorted by offset, the ranges that overlap a piece are adjacent.
        order = sorted(range(len(ranges)), key=lambda i: ranges[i].offset)
        first = 0
        for offset, piece in _pieces(store, file):
            whole.update(piece)
            end = offset + len(piece)
            for i in order[first:]:
                start, stop = ranges[i].offset, ranges[i].offset + ranges[i].length
                if start >= end:
                    break
                parts[i].update(piece[max(0, start - offset) : max(0, stop - offset)])
            while first < len(order) and _end(ranges[order[first]]) <= end:
                first += 1
        refuse_whole(file, whole.hexdigest(), commit)
        for range_, part in zip(ranges, parts, strict=True):
            if part.hexdigest() != range_.sha256:
                at = f"bytes {range_.offset}..{_end(range_)}"
                text = f"{at}: wrong digest in {commit}, although the digest of the file is correct"
                report.add(file.key, text)


def _pieces(store: Store, file: DataFile) -> Iterator[tuple[int, memoryview]]:
    for offset in range(0, file.size, _PIECE):
        length = min(_PIECE, file.size - offset)
        yield offset, memoryview(store.read_range(file.key, offset, length))


def _end(range_: Range) -> int:
    return range_.offset + range_.length
