"""Opened runs and recorded sets: steps, metrics, validations, policies and checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from pipeline.policies.fetch import fetch_policy
from pipeline.report.run_metrics import Validation, all_metrics, read_validation
from pipeline.run import keys
from pipeline.run.commit import files_in, read_commit
from pipeline.run.description import RunDescription, description_now
from pipeline.run.plan import read_plan
from pipeline.store import ObjectMissingError, Store, open_store, place_text
from pipeline.traces import TraceError, read_sample_file
from pipeline.traces.format.domain import MOST, check_number
from pipeline.traces.format.manifest import sealed_steps
from pipeline.upkeep.checkpoint_list import ListedCheckpoint, list_checkpoints
from pipeline.upkeep.policy_list import ListedPolicy, list_policies
from pipeline.upkeep.run_list import NoRunError, missing_run
from retrace.sealed import SealedStep, StepSample, open_step
from retrace.tokenizer import StagedTokenizer, Tokens


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


@dataclass(frozen=True)
class Run:
    """An opened run, or a recorded set, which has only steps.

    Each method reads the store again, so a run can be opened while it is running.
    """

    uri: str
    """The URI of the run's root."""
    recorded_set: bool
    """Whether the store contains sealed steps but no run description. This is true of recorded sets
    and of the output of `write_step`. For these, the methods for settings, metrics, policies,
    checkpoints, validations and text raise TraceError."""
    store: Store = field(repr=False)
    """The store with the run's objects. Pass it to functions that take a store, such as
    `read_manifest`."""

    @property
    def description(self) -> RunDescription:
        """The run description: resolved settings, digests of inputs, geometry, package versions.

        It is run.json with all that the newest attempt changed. Raises TraceError for a recorded
        set, and CorruptObjectError or StoreError if it cannot be read.
        """
        self._only_of_a_run("description")
        return description_now(self.store)

    def steps(self) -> list[int]:
        """Return the numbers of the sealed steps, ascending; the last may still await training."""
        return sealed_steps(self.store)

    def step(self, number: int) -> SealedStep:
        """Open a sealed step. Raises TraceError if the step is not sealed, or StoreError."""
        return open_step(self.store, number, self.tokenizer)

    def metrics(self) -> pa.Table:
        """Return the metrics of all trained steps, one row per step.

        Returns:
            A table with the column `step` (int64) and a float64 column for each metric. A value is
            null if the metric was not measured in the step. If pandas is installed, `.to_pandas()`
            converts the table to a data frame.

        Raises:
            TraceError: This is a recorded set, which has no metrics.
            StoreError: The store cannot be read.
        """
        self._only_of_a_run("metrics")
        found = all_metrics(self.store)
        names = sorted({name for step in found for name in step.values})
        columns = {"step": pa.array([step.step for step in found], pa.int64())}
        for name in names:
            columns[name] = pa.array([step.values.get(name) for step in found], pa.float64())
        return pa.table(columns)

    def validations(self) -> list[Validation]:
        """Return the finished validations in order of policy version.

        Raises the same errors as `metrics`.
        """
        self._only_of_a_run("validations")
        versions = self._versions(keys.validations(), keys.validation_plan)
        found = (read_validation(self.store, version) for version in versions)
        return [validation for validation in found if validation is not None]

    def validation(self, version: int) -> OpenedValidation:
        """Open the finished validation of a policy version, with its answers.

        Raises TraceError if there is none, and the same errors as `metrics`.
        """
        self._only_of_a_run("validations")
        found = read_validation(self.store, check_number(version, MOST, "policy version"))
        if found is None:
            raise TraceError(
                f"{self.uri}: no finished validation of policy {version}; Run.validations() lists "
                "the finished ones"
            )
        return OpenedValidation(**vars(found), store=self.store, tokenizer=self.tokenizer)

    def policies(self) -> list[int]:
        """Return the stored policy versions, ascending.

        While a run is in progress, it removes old versions. Raises the same errors as `metrics`.
        """
        self._only_of_a_run("policies")
        return self._versions(keys.policies(), keys.policy)

    def listed_policies(self) -> list[ListedPolicy]:
        """Return the form and size of each stored policy version, and whether it can be fetched.

        This method reads only commits, not weights. Raises the same errors as `metrics`.
        """
        self._only_of_a_run("policies")
        return list(list_policies(self.store))

    def listed_checkpoints(self) -> list[ListedCheckpoint]:
        """Return the stored checkpoints, ascending.

        A run keeps its last two checkpoints. A trainer with any parallel layout can continue from
        the newest one. This method reads only commits. Raises the same errors as `metrics`.
        """
        self._only_of_a_run("checkpoints")
        return list(list_checkpoints(self.store))

    def fetch_policy(self, version: int, folder: str | Path) -> Path:
        """Download a policy version as a Hugging Face model.

        The folder receives the safetensors files, the config and the tokenizer, even if the version
        is stored as a difference. All content is checked against its digests.

        Args:
            version: One of the versions that `policies` returns.
            folder: The folder to write into; it is created if it does not exist.

        Returns:
            The folder.

        Raises:
            TraceError: The version is not stored or cannot be fetched, `folder` is not a path, or
                this is a recorded set.
            CorruptObjectError: A stored object does not match its digest.
            StoreError: The store cannot be read.
            OSError: The folder cannot be written.
        """
        self._only_of_a_run("policies")
        version = check_number(version, MOST, "policy version")
        try:
            target = Path(place_text(folder))
        except ValueError as error:
            raise TraceError(f"folder: {error}; give the folder to write into") from error
        try:
            fetch_policy(self.store, version, target)
        except ObjectMissingError as error:
            listed = self.listed_policies()
            is_stored = version in [policy.version for policy in listed]
            what = "cannot be fetched" if is_stored else "is not stored"
            usable = [str(policy.version) for policy in listed if not policy.problem]
            fix = (
                f"give a version that can be fetched: {', '.join(usable)}"
                if usable
                else "no version can be fetched yet; try again when the run has written one"
            )
            raise TraceError(
                f"{self.uri}: policy version {version} {what} ({error}); {fix}"
            ) from error
        return target

    def text(self, tokens: Tokens) -> str:
        """Decode tokens with the run's own tokenizer; special tokens are kept.

        Raises TraceError if no tokenizer is stored, or StoreError.
        """
        return self.tokenizer.text(tokens)

    @cached_property
    def tokenizer(self) -> StagedTokenizer:
        """The tokenizer that `text` uses; `tokenizer.there` is true if the store contains one."""
        return StagedTokenizer(self.store)

    def _only_of_a_run(self, what: str) -> None:
        if self.recorded_set:
            raise TraceError(
                f"{self.uri}: no {what} there: the store has sealed steps but no "
                f"{keys.run_json()}, like a recorded set; open the run that wrote the steps"
            )

    def _versions(self, prefix: str, key_of: Callable[[int], str]) -> list[int]:
        found = [(info.key, keys.number_of(info.key)) for info in self.store.list(prefix)]
        return [n for key, n in found if n is not None and key == key_of(n)]


def open_run(uri: str | Path) -> Run:
    """Open a run or a recorded set.

    Args:
        uri: A folder, or a URI as described in docs/store.md. If the URI does not contain an
            endpoint, a region or credentials, these come from the environment.

    Raises:
        TraceError: Neither a run nor a recorded set exists at this location; the message names the
            runs below it.
        StoreError: The store cannot be read, or `uri` is neither a path nor a valid URI.
    """
    store = open_store(uri)
    if store.size(keys.run_json()) is not None:
        return Run(store.uri, False, store)
    if sealed_steps(store):
        return Run(store.uri, True, store)
    if (what := missing_run(str(uri))) is not None:
        raise TraceError(f"{uri}: {what}")
    raise NoRunError(
        f"{uri}: no run there; list runs with `retrace runs ls`, or give the folder or URI of a "
        "run (such as outputs/store/quickstart) or of a recorded set"
    )
