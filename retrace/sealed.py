"""Sealed steps of a run or recorded set: samples with tokens, text, reward and routes.

Dimensions: T is the number of rows of a sample (one for each position 0..S-2 of its S tokens), L
    the number of MoE layers, and K the number of experts per row.
"""

from collections.abc import Iterable, Iterator, Sequence
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
from pipeline.traces.format.domain import MOST_STEP, check_layers, check_number
from pipeline.traces.format.manifest import is_pruned, refuse_pruned, sealed_steps
from pipeline.traces.read.trainer import find_trainer_routes, joined
from retrace.tokenizer import StagedTokenizer

_PLACES = ("samples", "routes")
"""The columns of a manifest that locate a sample in the data files."""


@dataclass(frozen=True)
class StepSample(Sample):
    """A `Sample` of a sealed step, with prompt and response as text.

    `routes` contains the routes that the step's training used: sets_TLK [T, L, K], valid_T [T].
    """

    tokenizer: StagedTokenizer = field(repr=False, compare=False, kw_only=True)

    @property
    def prompt_text(self) -> str:
        """The prompt as text, decoded with the run's own tokenizer; special tokens are kept.

        Raises TraceError if no tokenizer is stored (a recorded set has none), or StoreError.
        """
        return self.tokenizer.text(self.prompt_tokens_P)

    @property
    def response_text(self) -> str:
        """The response as text, like `prompt_text`. Raises the same errors."""
        return self.tokenizer.text(self.response_tokens_G)


@dataclass(frozen=True)
class SealedStep:
    """A sealed step, opened by `Run.step`."""

    number: int
    """The step's number, counted from 0."""
    pruned: bool
    """Whether samples and routes were removed to free space. The manifest's rows remain."""
    manifest: Manifest = field(repr=False)
    """Sample ids, geometry, provenance and policy versions. The manifest refers to the routes that
    the step's training used: in R2 mode, the trainer recorded them; in R3 mode, the engine did."""
    store: Store = field(repr=False)
    tokenizer: StagedTokenizer = field(repr=False)
    awaits_routes: bool = False
    """Whether the trainer still has to record the step's routes (R2). If so, `manifest` is the
    manifest as it was sealed, without routes."""

    def table(self) -> pa.Table:
        """Return one row per sample: id, group, lengths, reward, digests and row counts."""
        return self.manifest.rows.drop_columns(list(_PLACES))

    def sample(self, id: str, layers: Iterable[int] | None = None) -> StepSample:
        """Return one sample by its id, such as '000003/17/2'.

        See `samples` for `layers` and for the errors raised.
        """
        return next(self.samples([id], layers))

    def samples(
        self, ids: Iterable[str] | None = None, layers: Iterable[int] | None = None
    ) -> Iterator[StepSample]:
        """Yield samples with tokens, reward and routes.

        Samples are fetched in small batches, so memory use does not grow with the size of the step.
        Each sample is checked against its digests.

        Args:
            ids: Sample ids; the samples are yielded in this order. None yields all samples of the
                step.
            layers: Indices of model layers; the routes' second axis has the same order. None reads
                all MoE layers. With an empty sequence, no routes are read and `routes` is None, as
                in a step without routes.

        Raises:
            TraceError: An id or a layer is unknown or malformed, or the step is pruned. The message
                names the sample or the step.
            ObjectMissingError, CorruptObjectError: An object is missing or damaged.
            StoreError: The store cannot be read.
        """
        refuse_pruned(self.store, self.number)
        if layers is not None:
            layers = check_layers(layers, f"step {self.number}: layers")
        for here in self.manifest.id_batches(ids):
            routes = self._routes(here, layers)
            for sample in read_samples(self.store, self.manifest, here):
                values = vars(sample) | {"routes": routes.get(sample.id)}
                yield StepSample(**values, tokenizer=self.tokenizer)

    def _routes(self, ids: Sequence[str], layers: Sequence[int] | None) -> dict[str, Routes]:
        if layers is not None and not len(layers):
            return {}
        manifest = self.manifest
        if self.awaits_routes:  # `used_routes` raises TraceError until the step is trained
            manifest = used_routes(self.store, self.number)
        if manifest.geometry is None and layers is None:
            return {}
        return read_routes(self.store, manifest, ids, layers)


def open_step(store: Store, number: int, tokenizer: StagedTokenizer) -> SealedStep:
    """Open a sealed step.

    Args:
        store: The store of the run or recorded set.
        number: The step's number, counted from 0.
        tokenizer: Decodes the texts of the step's samples.

    Raises:
        TraceError: The step is not sealed; the message lists the sealed steps.
        ObjectMissingError: An object that a commit names is missing.
        StoreError: The store cannot be read.
    """
    number = check_number(number, MOST_STEP, "step")
    if store.size(keys.manifest(number)) is None:
        raise TraceError(
            f"{store.uri}: step {number} is not sealed; sealed steps: {sealed_steps(store)}"
        )
    pruned = is_pruned(store, number)
    manifest = read_manifest(store, number)
    if manifest.training and store.size(keys.trainer_routes(number)) is None:
        return SealedStep(number, pruned, manifest, store, tokenizer, awaits_routes=True)
    trainer = find_trainer_routes(store, manifest)
    if trainer is not None and pruned:  # the files, and so the routes, are removed
        manifest = replace(manifest, provenance=trainer.provenance)
    elif trainer is not None:
        manifest = joined(store, manifest, trainer)
    return SealedStep(number, pruned, manifest, store, tokenizer)
