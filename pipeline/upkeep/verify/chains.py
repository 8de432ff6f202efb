"""The part of `verify` that reads policies: whole versions, differences, and chains of both.

While the whole version of a chain is read for its digests, each of its tensors is patched through
all later versions of the chain. Thus the whole version is read only once, and only one tensor and a
part of each difference are in memory at a time. For example, if version 5 is whole, each tensor is
checked as follows:

    tensor of 5 ──► patched by 6, digest as in 6's shares? ──► patched by 7, as in 7's? ──► ...
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.policies.coding import CodingError, apply
from pipeline.policies.places import CodedTensors
from pipeline.policies.tensors import StoredTensor
from pipeline.policies.versions import (
    WEIGHTS,
    PolicyVersion,
    check_base,
    check_fits,
    file_name,
    parse_version,
    policy_digest,
    read_tensors,
    stored_digest,
    weights_files,
)
from pipeline.policies.weights import Tensor, weights_digest
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, sha256
from pipeline.store import Store
from pipeline.upkeep.problems import Report
from pipeline.upkeep.verify.stored_run import committed, verify_files

_AHEAD = 128 << 20
"""Maximum number of bytes of coded tensors in memory, for all differences of a chain together."""

_Commit = tuple[int, str, Mapping[str, Any]]
"""Version, key and body of a policy's commit."""


@dataclass(frozen=True)
class _Sound:
    """A policy version whose own objects are correct."""

    policy: PolicyVersion
    tensors: Mapping[str, StoredTensor]
    """The tensors that its shares list, keyed by name; empty if it has no shares."""

    @property
    def key(self) -> str:
        return keys.policy(self.policy.version)


def verify_policies(store: Store, report: Report) -> None:
    """Check every committed policy version that retention has not removed."""
    found = sorted(committed(store, keys.policies(), "policy.json", report), key=lambda of: of[0])
    group: list[_Commit] = []
    for commit in found:
        if group and "difference" not in commit[2]:
            _verify_group(store, group, report)
            group = []
        group.append(commit)
    if group:
        _verify_group(store, group, report)


def _verify_group(store: Store, group: Sequence[_Commit], report: Report) -> None:
    """Check a whole version and the differences after it, or differences without a whole version.

    The differences are checked first, because the whole version's tensors are patched during its
    check.
    """
    whole = [commit for commit in group if "difference" not in commit[2]]
    differences = [_judged(store, commit, report) for commit in group[len(whole) :]]
    chain: list[_Sound] = []
    maker = None
    for commit in whole:
        maker = _maker(store, commit, differences)
        sound = _judged(store, commit, report, maker)
        chain = [] if sound is None else [sound]
    made = chain
    for sound in differences:
        if sound is not None and _continues(store, chain, sound, report):
            chain.append(sound)
        else:
            chain = []
    # If the chain's last version no longer exists, a running trainer removed the chain during the
    # check. The problems that this caused are not reported.
    if (
        maker is not None
        and made
        and maker.report.problems
        and store.size(maker.last.key) is not None
    ):
        report.take(maker.report)


def _judged(
    store: Store, commit: _Commit, report: Report, maker: "_Maker | None" = None
) -> _Sound | None:
    """Check a version's own objects; if one is incorrect, report the problem and return None."""
    version, key, body = commit
    report.policies += 1
    right = verify_files(store, key, body, report, maker)
    with report.parsing(key):
        policy = parse_version(body, version, store.uri)
        return _sound(store, key, body, policy, report) if right else None
    return None


def _sound(
    store: Store, key: str, body: Mapping[str, Any], policy: PolicyVersion, report: Report
) -> _Sound | None:
    """Check a version whose files were read.

    Returns None if the report already names a damaged file of this version. Raises
    CorruptObjectError and StoreError.
    """
    for file in weights_files(policy.files):
        if WEIGHTS in body and file.key not in report.weights:
            if any(problem.key == file.key for problem in report.problems):
                return None
            raise CorruptObjectError(f"{key}: {file.key} is not a complete safetensors file")
    tensors = read_tensors(store, policy)
    if tensors:
        _compare_files(key, policy, tensors, report)
        return _Sound(policy, tensors)
    if WEIGHTS in body:
        of_files = (report.weights[file.key] for file in weights_files(policy.files))
        expected = weights_digest(of_files)
    else:  # written before commits contained a digest of the weights
        expected = policy_digest(policy.files)
    if stored_digest(body) != expected:
        raise CorruptObjectError(
            f"{key}: digest {stored_digest(body)}, expected {expected} as computed from its "
            "weights; restore the object"
        )
    return _Sound(policy, {})


def _compare_files(
    key: str, policy: PolicyVersion, tensors: Mapping[str, StoredTensor], report: Report
) -> None:
    """Raise CorruptObjectError unless each file contains the tensors that the shares list for it.

    In a whole version, the tensors must also have the listed types, shapes and digests.
    """
    for file in weights_files(policy.files):
        held = {tensor.name: tensor for tensor in report.weights[file.key].tensors}
        listed = {n: of.tensor for n, of in tensors.items() if of.file == file_name(file)}
        for name in sorted(held.keys() | listed.keys()):
            if name not in held or name not in listed:
                has, lacks = (
                    ("its shares", file.key) if name in listed else (file.key, "its shares")
                )
                raise CorruptObjectError(
                    f"{key}: tensor {name} is in {file.key} according to {has}, but not according "
                    f"to {lacks}; restore the object that comes from another write"
                )
            if policy.difference is None and held[name] != listed[name]:
                raise CorruptObjectError(
                    f"{key}: tensor {name} is {_described(held[name])} in {file.key}, but "
                    f"{_described(listed[name])} in its share; restore the object"
                )


def _described(tensor: Any) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with SHA-256 {tensor.sha256[:16]}..."


def _continues(store: Store, chain: Sequence[_Sound], sound: _Sound, report: Report) -> bool:
    """Return whether a difference continues a chain.

    If it does not, add the reason to the report.
    """
    base = sound.policy.version - 1
    if store.size(keys.policy(base)) is None:
        if store.size(sound.key) is not None:  # retention has not removed it since
            report.add(
                keys.policy(base), f"no such object, but {sound.key} is the difference from it"
            )
        return False
    if not chain or chain[-1].policy.version != base:
        report.note(
            sound.key, f"its tensors are based on policy {base}, whose tensors could not be built"
        )
        return False
    with report.noting(sound.key):
        check_base(store, sound.policy, chain[-1].policy)
        check_fits(store, sound.policy, sound.tensors, chain[-1].tensors)
        return True
    return False


def _maker(store: Store, commit: _Commit, differences: Sequence[_Sound | None]) -> "_Maker | None":
    """Return a `_Maker` for the tensors of a chain whose whole version will be read next.

    Returns None if no difference continues the whole version, or if the shares of the whole version
    are unreadable. In these cases, `_continues` later reports the reason.
    """
    version, key, body = commit
    chain: list[_Sound] = []
    with Report(store.uri).parsing(key):
        policy = parse_version(body, version, store.uri)
        chain.append(_Sound(policy, read_tensors(store, policy)))
        for sound in differences:
            base = chain[-1]
            if sound is None or sound.policy.version != base.policy.version + 1:
                break
            check_base(store, sound.policy, base.policy)
            check_fits(store, sound.policy, sound.tensors, base.tensors)
            chain.append(sound)
    return _Maker(store, chain) if len(chain) > 1 else None


class _Maker:
    """Builds each tensor that the differences in a chain change, and checks its digests.

    After each difference, the digest is compared with the one in the difference's shares.
    """

    def __init__(self, store: Store, chain: Sequence[_Sound]) -> None:
        self.report = Report(store.uri)
        """Problems that are reported only if the whole version is correct."""
        self.last = chain[-1]
        self._first, *self._differences = chain
        self._stopped = True
        with self.report.noting(self.last.key):
            ahead = _AHEAD // len(self._differences)
            self._coded = [
                CodedTensors(store, weights_files(sound.policy.files), ahead)
                for sound in self._differences
            ]
            self._stopped = False

    def needs(self, name: str) -> bool:
        """Return whether a difference changes this tensor."""
        if self._stopped or name not in self._first.tensors:
            return False
        return any(sound.tensors[name].file for sound in self._differences)

    def take(self, tensor: Tensor, content: bytearray) -> None:
        """Patch a tensor through the chain, unless it differs from its description in the share."""
        if tensor == self._first.tensors[tensor.name].tensor:
            self._stopped = True
            with self.report.noting(self.last.key):
                self._patch(tensor.name, content)
                self._stopped = False

    def _patch(self, name: str, content: bytearray) -> None:
        """Patch a tensor up to the first incorrect difference.

        Each incorrect difference is reported only once.
        """
        wrong = {problem.key for problem in self.report.problems}
        for sound, coded in zip(self._differences, self._coded, strict=True):
            tensor, file = sound.tensors[name]
            if file is None:
                continue
            key = coded.file_of(name).key
            if key in wrong:
                return
            try:
                apply(coded.read(name), content)
            except CodingError as error:
                self.report.add(key, f"tensor {name}: {error}; restore the object")
                return
            if (found := sha256(memoryview(content))) != tensor.sha256:
                self.report.add(
                    key,
                    f"tensor {name} after this patch has SHA-256 {found[:16]}..., expected "
                    f"{tensor.sha256[:16]}... as in its share; restore the object",
                )
                return
