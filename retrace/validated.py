"""Finished validations of a run, with their answers."""

from dataclasses import dataclass, field
from functools import cached_property

from pipeline.report.run_metrics import Validation, read_validation
from pipeline.run import keys
from pipeline.run.commit import files_in, read_commit
from pipeline.run.plan import read_plan
from pipeline.store import Store
from pipeline.traces import TraceError, read_sample_file
from retrace.sealed import StepSample
from retrace.tokenizer import StagedTokenizer


@dataclass(frozen=True)
class OpenedValidation(Validation):
    """A policy version's validation, opened by `Run.validation`: its results and its answers."""

    store: Store = field(repr=False, kw_only=True)
    tokenizer: StagedTokenizer = field(repr=False, kw_only=True)

    @cached_property
    def samples(self) -> tuple[StepSample, ...]:
        """All answers in the order of their shards, with tokens, text and reward.

        They have no routes. Their ids begin with 'val-': 'val-000008/17/0'. Raises
        ObjectMissingError, CorruptObjectError and StoreError.
        """
        plan = read_plan(self.store, keys.validation_plan(self.version))
        found: list[StepSample] = []
        for shard in range(plan.shards):
            for file in files_in(read_commit(self.store, plan.shard_key(shard))):
                samples = read_sample_file(self.store, file)
                found += (StepSample(**vars(one), tokenizer=self.tokenizer) for one in samples)
        return tuple(found)

    def sample(self, id: str) -> StepSample:
        """Return an answer by its id. Raises TraceError if there is none."""
        for one in self.samples:
            if one.id == id:
                return one
        raise TraceError(f"sample {id}: not in the validation of policy {self.version}")


def open_validation(store: Store, version: int, tokenizer: StagedTokenizer) -> OpenedValidation:
    """Open a finished validation.

    Args:
        store: The run.
        version: The policy version.
        tokenizer: Decodes the texts of the answers.

    Raises:
        TraceError: There is no finished validation of this version.
        StoreError: The store cannot be read.
    """
    found = read_validation(store, version)
    if found is None:
        raise TraceError(
            f"{store.uri}: no finished validation of policy {version}; Run.validations() lists the "
            "finished ones"
        )
    return OpenedValidation(**vars(found), store=store, tokenizer=tokenizer)
