"""The part of `verify` that compares data files, read piece by piece, with their commits."""

import hashlib

from pipeline.run.commit import CorruptObjectError, DataFile
from pipeline.store import ObjectMissingError, Store
from pipeline.upkeep.problems import Report

_PIECE = 64 << 20  # bytes in memory at once


def verify_data(store: Store, file: DataFile, report: Report, commit: str) -> bool:
    """Compare a data file's size and digest with those in its commit; read each file only once.

    Args:
        store: The run or recorded set.
        file: The data file.
        report: Receives problems.
        commit: Key of the commit, for messages.

    Returns:
        Whether the file is correct.
    """
    if report.seen.get(file.key) == file:
        return all(problem.key != file.key for problem in report.problems)
    report.seen[file.key] = file
    before = report.found
    with report.noting(file.key):
        size = store.size(file.key)
        if size is None:
            raise ObjectMissingError(f"{file.key}: no such object; {commit} names it")
        if size != file.size:
            raise CorruptObjectError(
                f"{file.key}: {size} bytes, expected {file.size} as in {commit}; restore the object"
            )
        digest = hashlib.sha256()
        for offset in range(0, file.size, _PIECE):
            digest.update(store.read_range(file.key, offset, min(_PIECE, file.size - offset)))
        if (found := digest.hexdigest()) != file.sha256:
            raise CorruptObjectError(
                f"{file.key}: SHA-256 {found[:16]}..., expected {file.sha256[:16]}... as in "
                f"{commit}; restore the object"
            )
    return report.found == before
