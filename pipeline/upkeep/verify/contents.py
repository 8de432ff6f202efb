"""The part of `verify` that compares data files, read piece by piece, with their commits."""

import hashlib
from collections.abc import Iterator, Sequence

from pipeline.run.commit import CorruptObjectError, DataFile
from pipeline.run.weights import SUFFIX, read_stored_weights
from pipeline.store import ObjectMissingError, Store
from pipeline.traces.format.chunks import Range, TraceFile
from pipeline.upkeep.problems import Report

_PIECE = 64 << 20  # bytes in memory at once


def verify_data(store: Store, file: DataFile, report: Report, commit: str) -> None:
    """Compare a data file's size and digest with those in its commit, once per file.

    `report.weights` gets the tensors of safetensors files that are whole.
    """
    if file.key.endswith(SUFFIX):
        _verify_weights(store, file, report, commit)
    else:
        _verify(store, file, (), report, commit)


def verify_file(store: Store, file: TraceFile, report: Report, commit: str) -> None:
    """Compare a trace file and each of its ranges with their digests, once per file."""
    _verify(store, file.data, file.ranges, report, commit)


def _verify_weights(store: Store, file: DataFile, report: Report, commit: str) -> None:
    if report.seen.get(file.key) == file:
        return
    report.seen[file.key] = file
    with report.noting(file.key):
        check_size(store, file, commit)
        try:
            report.weights[file.key] = read_stored_weights(store, file)
        except CorruptObjectError:  # another file, or no safetensors: its policy judges the latter
            del report.seen[file.key]
            _verify(store, file, (), report, commit)


def check_size(store: Store, file: DataFile, commit: str) -> None:
    """Raise StoreError unless a file that a commit names is there with its full size."""
    size = store.size(file.key)
    if size is None:
        raise ObjectMissingError(f"{file.key}: no such object; {commit} names it")
    if size != file.size:
        raise CorruptObjectError(
            f"{file.key}: {size} bytes, {commit} says {file.size}; restore the object"
        )


def refuse_whole(file: DataFile, digest: str, commit: str) -> None:
    """Raise CorruptObjectError unless this is the digest of a file in its commit."""
    if digest != file.sha256:
        raise CorruptObjectError(
            f"{file.key}: SHA-256 {digest[:16]}..., {commit} says {file.sha256[:16]}...; "
            "restore the object"
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
        # In order of offset, only a few ranges overlap each piece.
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
                text = f"{at}: {commit} has another digest of them than of the whole file"
                report.add(file.key, text)


def _pieces(store: Store, file: DataFile) -> Iterator[tuple[int, memoryview]]:
    for offset in range(0, file.size, _PIECE):
        length = min(_PIECE, file.size - offset)
        yield offset, memoryview(store.read_range(file.key, offset, length))


def _end(range_: Range) -> int:
    return range_.offset + range_.length
