"""A run or recorded set in its store, opened: steps, metrics, validations, policies."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from pipeline.report.run_metrics import Validation, all_metrics, read_validation
from pipeline.run import keys
from pipeline.run.amendments import (
    Amendment,
    description_at,
    description_now,
    read_amendments,
)
from pipeline.run.description import RunDescription
from pipeline.run.policy import fetch_policy
from pipeline.store import ObjectMissingError, Store, open_store
from pipeline.traces import TraceError
from pipeline.traces.format.manifest import sealed_steps
from pipeline.upkeep.run_list import missing_run
from retrace.sealed import SealedStep, open_step
from retrace.tokenizer import StagedTokenizer, Tokens


@dataclass(frozen=True)
class Run:
    """A run, or a recorded set, which has steps and nothing else.

    Every method looks into the store anew, so a run may be opened while it goes on.
    """

    uri: str
    """Of its root."""
    recorded_set: bool
    """There are sealed steps and no description: a recorded set, or what `write_step` wrote. What a
    run alone has (settings, metrics, policies, validations, text) is a TraceError here."""
    store: Store = field(repr=False)
    """Where its objects lie; what else takes a store (`read_manifest`, ...) works on it too."""

    @property
    def description(self) -> RunDescription:
        """What the run is: resolved settings, inputs by digest, geometry, versions of packages.

        It is run.json with its amendments. Raises TraceError for a recorded set;
        CorruptObjectError, StoreError.
        """
        self._only_of_a_run("description")
        return description_now(self.store)

    def description_at(self, step: int) -> RunDescription:
        """What the run was when a step was made: run.json with the amendments up to that step.

        Raises as `description`.
        """
        self._only_of_a_run("description")
        return description_at(self.store, step)

    def amendments(self) -> list[Amendment]:
        """What later starts changed of the run, in order; each holds from its `from_step` on.

        Raises as `description`.
        """
        self._only_of_a_run("amendments")
        return read_amendments(self.store)

    def steps(self) -> list[int]:
        """Numbers of the sealed steps, ascending; the last one may not be trained yet."""
        return sealed_steps(self.store)

    def step(self, number: int) -> SealedStep:
        """A sealed step. Raises TraceError when it is not sealed; StoreError."""
        return open_step(self.store, number, self.tokenizer)

    def metrics(self) -> pa.Table:
        """A row per trained step: `step`, and a column per metric, null where it was not measured.

        `.to_pandas()` makes a data frame of it. Raises TraceError for a recorded set; StoreError.
        """
        self._only_of_a_run("metrics")
        found = all_metrics(self.store)
        names = sorted({name for step in found for name in step.values})
        columns = {"step": pa.array([step.step for step in found], pa.int64())}
        for name in names:
            values = [step.values.get(name) for step in found]
            columns[name] = pa.array(
                [None if value is None else float(value) for value in values], pa.float64()
            )
        return pa.table(columns)

    def validations(self) -> list[Validation]:
        """The finished validations, by policy version. Raises as `metrics`."""
        self._only_of_a_run("validations")
        found = [
            read_validation(self.store, version)
            for version in self._versions(keys.validations(), keys.validation_plan)
        ]
        return [validation for validation in found if validation is not None]

    def policies(self) -> list[int]:
        """The policy versions that are stored, ascending: older ones are removed in the run.

        Raises as `metrics`.
        """
        self._only_of_a_run("policies")
        return self._versions(keys.policies(), keys.policy)

    def fetch_policy(self, version: int, folder: str | Path) -> Path:
        """Download a policy version into a folder, which is made, and return the folder.

        It is a Hugging Face model: safetensors, config and tokenizer. Each file is compared with
        its digest. Raises TraceError when the version is not stored, or for a recorded set;
        CorruptObjectError, StoreError, OSError.
        """
        self._only_of_a_run("policies")
        try:
            fetch_policy(self.store, version, Path(folder))
        except ObjectMissingError as error:
            raise TraceError(
                f"{self.uri}: policy version {version} is not there ({error}); stored versions: "
                f"{self.policies()}"
            ) from error
        return Path(folder)

    def text(self, tokens: Tokens) -> str:
        """Tokens as text by the run's own tokenizer, special ones included.

        Raises TraceError where no tokenizer is stored; StoreError.
        """
        return self.tokenizer.text(tokens)

    @cached_property
    def tokenizer(self) -> StagedTokenizer:
        """What `text` uses; `tokenizer.there` says whether one is stored."""
        return StagedTokenizer(self.store)

    def _only_of_a_run(self, what: str) -> None:
        if self.recorded_set:
            raise TraceError(
                f"{self.uri}: no {what} there: it has sealed steps and no {keys.run_json()}, as a "
                "recorded set does; open the run that wrote it"
            )

    def _versions(self, prefix: str, key_of: Callable[[int], str]) -> list[int]:
        found = [(info.key, keys.number_of(info.key)) for info in self.store.list(prefix)]
        return [n for key, n in found if n is not None and key == key_of(n)]


def open_run(uri: str | Path) -> Run:
    """Open a run or a recorded set: a folder, or a URI as in docs/store.md.

    What a URI does not say (endpoint, region, credentials) is taken from the environment.
    Raises TraceError when neither is there, naming the runs below it; StoreError.
    """
    store = open_store(str(uri))
    if store.size(keys.run_json()) is not None:
        return Run(store.uri, False, store)
    if sealed_steps(store):
        return Run(store.uri, True, store)
    what = missing_run(str(uri)) or (
        "no run there; list runs with `retrace runs ls`, or give the folder or URI of a run "
        "(such as outputs/store/quickstart) or of a recorded set"
    )
    raise TraceError(f"{uri}: {what}")
