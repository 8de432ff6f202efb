"""Publishes policies: all ranks write the model's weights to the store.

main thread                                background
for each round of tensors:
  wait until all ranks have buffer space
  gather them, copy them to the host ──►   digests, multipart upload
the next step begins                       the rest of the upload, this rank's share
                                           rank 0: waits for all shares, commits
"""

import bisect
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from operators.training.agree import agreed, await_ranks, gathered
from operators.training.background import Background
from operators.training.publish.buffer import TensorBuffer
from operators.training.publish.exporter import Exporter
from operators.training.publish.kept import Changes, KeptShare
from pipeline.metrics.metric import Metrics
from pipeline.policies.publish import (
    commit_shares,
    difference_name,
    index_of,
    weights_name,
    write_difference,
    write_weights,
)
from pipeline.policies.tensors import StoredTensor, share_body
from pipeline.policies.versions import WEIGHTS, Difference
from pipeline.policies.weights import INDEX, SUFFIX, Tensor, tensors_digest
from pipeline.run import keys
from pipeline.run.commit import DataFile, new_write_id, put_file, sha256
from pipeline.run.shares import await_shares, write_share
from pipeline.store import Store

logger = logging.getLogger(__name__)

_NO_EXPORT: Metrics = {
    "policy/bytes": None,
    "policy/changed": None,
    "time/policy_export_s": None,
}


@dataclass(frozen=True)
class Stored:
    """A policy version in the store, and this trainer's weights for the same version."""

    sha256: str
    """The weights digest of the stored version; another trainer may have written it first."""
    ours: str
    """The digest of this trainer's weights."""
    metrics: Metrics
    """Metrics of the export; their values are None if the version already existed."""

    @property
    def drifted(self) -> bool:
        """Return whether the stored weights differ from this trainer's."""
        return self.sha256 != self.ours


@dataclass(frozen=True)
class PublishOptions:
    """Options for writing policies."""

    room: int
    """Maximum size, in bytes, of the tensors in a rank's memory that are not written yet."""
    timeout_s: float
    """Seconds that rank 0 waits for the shares of the other ranks."""
    every: int | None = None
    """One in this many versions is whole, and the others are differences; None if all are whole."""


@dataclass(frozen=True)
class _Base:
    """A version that may be the base of the next one."""

    version: int
    weights_sha256: str
    whole: int
    """The whole version at the start of this version's chain."""


class Publisher:
    """Writes policy versions. All ranks must call its methods together."""

    def __init__(
        self,
        store: Store,
        exporter: Exporter,
        source: Path,
        folder: Path,
        background: Background,
        options: PublishOptions,
    ) -> None:
        """Prepare to write policies.

        Args:
            store: The store of the run.
            exporter: This rank's share of an export.
            source: A Hugging Face folder with the model's config and tokenizer.
            folder: This rank's scratch folder.
            background: The thread that uploads and commits.
            options: Options for writing policies.
        """
        self._store = store
        self._exporter = exporter
        self._source = source
        self._background = background
        self._options = options
        self._names = _names(exporter.listed)
        self._writers = [rank for rank, names in enumerate(self._names) if names or rank == 0]
        self._kept = None if options.every is None else KeptShare(folder, exporter.files)
        self._last: Future[_Base | None] | None = None
        """On rank 0, the base for the next version; done when the latest version is committed.
        Until then, the upload of the latest version may still read the scratch file."""

    def publish(self, version: int, then: Callable[[Stored], None]) -> None:
        """Begin to write the model's weights as a policy version that the store lacks.

        The upload continues in the background, where rank 0 calls `then` after the commit. If the
        publisher writes differences, this method waits until the previous version is committed.
        """
        write_id = agreed(new_write_id)
        began = time.monotonic()
        if self._kept is None:
            base, metrics = None, _NO_EXPORT
            self._stream(version, write_id)
        else:
            base, metrics = self._hand_over(self._kept, version, write_id)
        if dist.get_rank() != 0:
            return
        last: Future[_Base | None] = Future()
        self._last = last

        def commit() -> None:
            stored, own = self._commit(version, write_id, base)
            last.set_result(own)
            export_s = {"time/policy_export_s": time.monotonic() - began}
            then(replace(stored, metrics={**metrics, **stored.metrics, **export_s}))

        self._background.submit(f"committing policy {version}", commit)

    def _stream(self, version: int, write_id: str) -> None:
        """Pass the tensors to an upload that runs at the same time."""
        buffer = TensorBuffer(self._options.room, self._background.check)
        self._submit_upload(version, partial(self._upload, version, write_id, iter(buffer)))
        self._fill(buffer)

    def _hand_over(
        self, kept: KeptShare, version: int, write_id: str
    ) -> tuple[_Base | None, Metrics]:
        """Copy the tensors, and begin to upload a whole version or a difference.

        The version is a difference if a base exists and the coded changes take up less than half
        the size of all tensors. Returns the base (None for a whole version) and the metrics.
        """
        base = agreed(lambda: self._base_of(version))
        changes = self._taken(kept, compare=base is not None)
        counts = gathered(changes.counts)
        metrics = dict(_NO_EXPORT)
        if base is not None:
            values = sum(of_rank.values for of_rank in counts)
            metrics["policy/changed"] = sum(of_rank.changed for of_rank in counts) / values
        if base is not None and 2 * sum(c.coded_bytes for c in counts) < self._exporter.size:
            writers = [rank for rank, of_rank in enumerate(counts) if of_rank.tensors]
            number = bisect.bisect_left(writers, dist.get_rank())
            name = difference_name(number, len(writers))
            upload = partial(self._upload_difference, version, write_id, changes, name)
        else:
            base = None
            upload = partial(self._upload, version, write_id, kept.contents())
        self._submit_upload(version, upload)
        return base, metrics

    def _taken(self, kept: KeptShare, compare: bool) -> Changes:
        """Copy the model's tensors to the scratch file, and return their changes."""
        with ThreadPoolExecutor(1, "coding") as thread:
            coding: Future[Changes] = Future()

            def check() -> None:
                if coding.done():
                    coding.result()

            buffer = TensorBuffer(self._options.room, check)
            coding = thread.submit(kept.update, iter(buffer), compare)
            self._fill(buffer)
            return coding.result()

    def _fill(self, buffer: TensorBuffer) -> None:
        """Put this rank's tensors into the buffer. Every rank must call this."""

        def prepare(size: int) -> None:
            buffer.reserve(size)
            await_ranks()  # gathering begins when every rank has space

        try:
            for content in self._exporter.tensors(prepare):
                buffer.put(content)
            for content in self._exporter.untrained():
                buffer.reserve(content.nbytes)
                buffer.put(content)
        except BaseException:
            buffer.drop()
            raise

    def _base_of(self, version: int) -> _Base | None:
        """Return the base for a version, on rank 0; None if the version must be whole.

        Waits for the commit of the previous version. Raises the error of a failed job.
        """
        if self._last is None or self._options.every is None:
            return None
        base = self._background.wait_for(self._last)
        if base is None or base.version != version - 1:
            return None
        return base if version - base.whole < self._options.every else None

    def compare(self, version: int, known: str, then: Callable[[Stored], None]) -> None:
        """Compare the model's weights with a version that is, or was, in the store.

        This method does not write to the store.

        Args:
            version: The policy version.
            known: The version's weights digest, or the digest of its files in an older run.
            then: A function that rank 0 calls with the result, in the background.
        """
        exporter = self._exporter
        contents = itertools.chain(exporter.tensors(lambda _: None), exporter.untrained())
        # Consume all contents, because a rank still sends parts of other ranks' tensors after its
        # own last tensor.
        digests = [hashlib.sha256(content).hexdigest() for content in contents]
        places = (tensor for file in exporter.files for tensor in file)
        own = [
            Tensor(tensor.name, tensor.dtype, tensor.shape, digest)
            for tensor, digest in zip(places, digests, strict=True)
        ]
        ours = tensors_digest(tensor for of_rank in gathered(own) for tensor in of_rank)
        if dist.get_rank() == 0:
            self._background.submit(
                f"comparing policy {version}",
                lambda: then(compared(version, known, ours, _NO_EXPORT)),
            )

    def _submit_upload(self, version: int, upload: Callable[[], None]) -> None:
        if dist.get_rank() in self._writers:
            self._background.submit(f"uploading policy {version}", upload)

    def _upload(self, version: int, write_id: str, contents: Iterator[memoryview]) -> None:
        rank = dist.get_rank()
        written = [
            write_weights(self._store, keys.policy_file(version, write_id, name), file, contents)
            for name, file in zip(self._names[rank], self._exporter.files, strict=True)
        ]
        files = [of.file for of in written]
        if rank == 0:
            files += self._others(version, write_id)
        body = share_body(version, files, (t for of in written for t in of.tensors))
        write_share(self._store, keys.policy_share(version, write_id, rank), body, write_id)

    def _upload_difference(self, version: int, write_id: str, changes: Changes, name: str) -> None:
        key = keys.policy_file(version, write_id, name)
        files = [write_difference(self._store, key, changes.writer)] if changes.names else []
        tensors = (
            StoredTensor(t, name if t.name in changes.names else None) for t in changes.tensors
        )
        body = share_body(version, files, tensors)
        share = keys.policy_share(version, write_id, dist.get_rank())
        write_share(self._store, share, body, write_id)

    def _others(self, version: int, write_id: str) -> Iterator[DataFile]:
        """Write the files that are not weights: config, tokenizer and index."""
        for path in sorted(self._source.iterdir()):
            if path.is_file() and path.suffix != SUFFIX and path.name != INDEX:
                yield put_file(self._store, keys.policy_file(version, write_id, path.name), path)
        of_files = {
            name: tensors
            for names, files in zip(self._names, self._exporter.listed, strict=True)
            for name, tensors in zip(names, files, strict=True)
        }
        if len(of_files) > 1:
            key, index = keys.policy_file(version, write_id, INDEX), index_of(of_files)
            self._store.create(key, index)
            yield DataFile(key, len(index), sha256(index))

    def _commit(
        self, version: int, write_id: str, base: _Base | None
    ) -> tuple[Stored, _Base | None]:
        """Commit a version. If the commit is ours, the version may be the base for the next one."""
        of_writers = [keys.policy_share(version, write_id, rank) for rank in self._writers]
        shares = await_shares(self._store, of_writers, self._options.timeout_s)
        difference = None if base is None else Difference(base.version, base.weights_sha256)
        committed, policy = commit_shares(self._store, version, shares, write_id, difference)
        ours = str(policy.weights_sha256)
        metrics: Metrics = {"policy/bytes": policy.size}
        stored = compared(version, committed.body[WEIGHTS], ours, metrics)
        own = _Base(version, ours, version if base is None else base.whole)
        return stored, own if committed.ours else None


def compared(version: int, known: str, ours: str, metrics: Metrics) -> Stored:
    """Compare the digest of a stored version with the digest of this trainer's weights.

    If the weights differ, log a warning.

    Args:
        version: The policy version.
        known: The weights digest of the stored version.
        ours: The digest of this trainer's weights.
        metrics: Metrics of the export, for the result.

    Returns:
        Both weights digests, and the metrics.
    """
    if known != ours:
        logger.warning(
            "policy %d has digest %s in the store, but training its step again gave %s; rollouts "
            "use the stored policy (counted in resume/policy_drift)",
            version,
            known,
            ours,
        )
    return Stored(known, ours, metrics)


def _names(listed: Sequence[Sequence[object]]) -> list[list[str]]:
    """Return the names of each rank's weights files."""
    count = sum(map(len, listed))
    numbers = itertools.count()
    return [[weights_name(next(numbers), count) for _ in files] for files in listed]
