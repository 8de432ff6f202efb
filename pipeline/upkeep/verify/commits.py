"""The part of `verify` that checks the JSON of trace commits."""

import re
from collections.abc import Iterator, Mapping

from pipeline.errors import cut
from pipeline.run.commit import other_place
from pipeline.traces.format.header import Header
from pipeline.traces.format.types import TraceError

_WRITE_ID = re.compile(r"[0-9a-f]{8}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ROLES = {"samples", "routes", "manifest"}


def check_commit(header: Header, place: Mapping[str, object], roles: Mapping[str, int]) -> None:
    """Raise TraceError unless a commit fits its key and lists the expected files.

    Args:
        header: The commit.
        place: The fields that its body must contain, for example {"step": 3, "shard": 0}.
        roles: The expected number of files for each role.
    """
    for text in _problems(header, place, roles):
        raise TraceError(f"{header.key}: {text}")


def check_file_names(header: Header) -> None:
    """Raise TraceError unless a commit's files are named after the commit and its write id.

    A commit that was copied from a recorded set names the files of that set. The names of these
    files are compared with the key that the commit had in the set.
    """
    stem = first_key(header.key).removesuffix(".json")
    for file in header.files:
        if file.role in _ROLES:
            role = "" if file.role == "manifest" else f".{file.role}"
            expected = f"{stem}.{header.body['attempt']}{role}.parquet"
            if file.data.key != expected:
                raise TraceError(f"{header.key}: it names {file.data.key}, expected {expected}")


def first_key(key: str) -> str:
    """Return the key that an object had in the run that wrote it, before other runs copied it."""
    return re.sub(r"/(replay/)+", "/", key)


def _problems(
    header: Header, place: Mapping[str, object], roles: Mapping[str, int]
) -> Iterator[str]:
    body = header.body
    if (text := other_place(body, place)) is not None:
        yield text
    if not _WRITE_ID.fullmatch(str(body.get("attempt"))):
        yield f"attempt {cut(body.get('attempt'))}, expected a write id of 8 hexadecimal digits"
    if (header.geometry is None) != (header.provenance is None):
        yield "geometry and provenance go together, but only one of them is present"
    for role, number in roles.items():
        there = sum(file.role == role for file in header.files)
        if there != number:
            yield f"{there} files of role {role}, expected {number}"
    if strange := {file.role for file in header.files} & _ROLES - roles.keys():
        yield f"a file of role {min(strange)}, which this commit cannot have"
    for file in header.files:
        digests = [file.data.sha256, *(range_.sha256 for range_ in file.ranges)]
        for digest in digests:
            if not _DIGEST.fullmatch(digest):
                yield f"{file.data.key}: digest {cut(digest)}, expected 64 hexadecimal digits"
    if len({file.data.key for file in header.files}) != len(header.files):
        yield "it lists a file twice"
