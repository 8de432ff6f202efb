"""A sealed step of a run or recorded set: its samples with tokens, text, reward and routes.

Letters: T rows of a sample (one per position 0..S-2), L MoE layers, K experts per row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from pipeline.run import keys
from pipeline.store import Store
from pipeline.traces import (
    Manifest,
    Routes,
    Sample,
    TraceError,
    read_manifest,
    read_routes,
    read_samples,
    used_routes,
)
from pipeline.traces.format.manifest import sealed_steps
from pipeline.traces.format.pruned import is_pruned, refuse_pruned
from pipeline.traces.read.joined import joined
from pipeline.traces.read.training import find_training_set
from retrace.tokenizer import StagedTokenizer

_SAMPLES_AT_ONCE = 64
_PLACES = ("samples", "routes")
"""Columns of a manifest that say where in its files a sample is."""


@dataclass(frozen=True)
class StepSample(Sample):
    """A sample as it lies in a sealed step: a `Sample` with its texts.

    `routes` are those that the step's training used: sets_TLK [T, L, K], valid_T [T].
    """

    tokenizer: StagedTokenizer = field(repr=False, compare=False, kw_only=True)

    @property
    def prompt_text(self) -> str:
        """The prompt by the run's own tokenizer, special tokens included.

        Raises TraceError where no tokenizer is stored (a recorded set); StoreError.
        """
        return self.tokenizer.text(self.prompt_tokens_P)

    @property
    def response_text(self) -> str:
        """The response, likewise. Raises as `prompt_text`."""
        return self.tokenizer.text(self.response_tokens_G)


@dataclass(frozen=True)
class SealedStep:
    """One sealed step; `Run.step` opens it."""

    number: int
    """Counted from 0."""
    pruned: bool
    """Samples and routes were removed to free space; the manifest's rows are left."""
    manifest: Manifest = field(repr=False)
    """Sample ids, geometry, provenance and policy versions; its routes are those that the step's
    training used: recorded by the trainer (R2), otherwise by the engine (R3)."""
    store: Store = field(repr=False)
    tokenizer: StagedTokenizer = field(repr=False)
    awaits_routes: bool = False
    """The trainer records the step's routes (R2), and has not done so yet; `manifest` is as it was
    sealed."""

    def table(self) -> pa.Table:
        """One row per sample: id, group, lengths, reward, digests, numbers of rows."""
        return self.manifest.rows.drop_columns(list(_PLACES))

    def sample(self, id: str, layers: Sequence[int] | None = None) -> StepSample:
        """One sample by its id, such as '000003/17/2'. Raises as `samples`."""
        return next(self.samples([id], layers))

    def samples(
        self, ids: Sequence[str] | None = None, layers: Sequence[int] | None = None
    ) -> Iterator[StepSample]:
        """Samples with tokens, reward and routes, in the order of `ids`; None: all of the step.

        `layers` are indices in the model, in the order of the routes' second axis; None: all MoE
        layers; (): no routes are read, and `routes` is None, as in a step without routes. A few
        samples are fetched at a time, whatever the step's size, and compared with their digests.

        Raises TraceError, naming the sample, for an unknown id or layer and for a pruned step;
        ObjectMissingError, CorruptObjectError, StoreError.
        """
        refuse_pruned(self.store, self.number)
        wanted = self.manifest.ids if ids is None else ids
        for start in range(0, len(wanted), _SAMPLES_AT_ONCE):
            here = wanted[start : start + _SAMPLES_AT_ONCE]
            routes = self._routes(here, layers)
            for sample in read_samples(self.store, self.manifest, here):
                values = vars(sample) | {"routes": routes.get(sample.id)}
                yield StepSample(**values, tokenizer=self.tokenizer)

    def _routes(self, ids: Sequence[str], layers: Sequence[int] | None) -> dict[str, Routes]:
        if layers is not None and not len(layers):
            return {}
        manifest = self.manifest
        if self.awaits_routes:  # an error, until the step is trained
            manifest = used_routes(self.store, self.number)
        if manifest.geometry is None and layers is None:
            return {}
        return read_routes(self.store, manifest, ids, layers)


def open_step(store: Store, number: int, tokenizer: StagedTokenizer) -> SealedStep:
    """A sealed step. Raises TraceError when it is not sealed; ObjectMissingError, StoreError."""
    if store.size(keys.manifest(number)) is None:
        raise TraceError(
            f"{store.uri}: step {number} is not sealed; sealed steps: {sealed_steps(store)}"
        )
    pruned = is_pruned(store, number)
    manifest = read_manifest(store, number)
    if manifest.training and store.size(keys.training_set(number)) is None:
        return SealedStep(number, pruned, manifest, store, tokenizer, awaits_routes=True)
    training = find_training_set(store, manifest)
    if training is not None and pruned:  # its files are gone, and its routes with them
        manifest = replace(manifest, provenance=training.provenance)
    elif training is not None:
        manifest = joined(store, manifest, training)
    return SealedStep(number, pruned, manifest, store, tokenizer)
