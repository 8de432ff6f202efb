"""An attempt of a run: its operational settings in the store, and the object that ends it.

    settings of the flow ─► attempts/NNN.json ─► in_force(run's settings) ─► settings of workers

The settings tree marks the settings that may change between attempts. Of these, the attempt's
object stores the settings that workers read, each under the last part of its dotted key.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from pipeline.config.keys import Key, setting_keys, value_at
from pipeline.config.stored import read_stored
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.run import keys
from pipeline.run.commit import (
    CorruptObjectError,
    commit,
    find_commit,
    new_write_id,
    parsing,
    read_commit,
)
from pipeline.run.description import INPUTS, RunDescription, with_settings
from pipeline.run.owner import (
    IsOver,
    Owner,
    is_alive,
    owner_json,
    owner_of,
    remove_signs,
    signs_of_life,
)
from pipeline.run.parse import Count, typed
from pipeline.run.restarts import attempt_count
from pipeline.store import Store, StoreError


def _ignore(text: str) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class Attempt:
    """One start of a run, as its workers see it. Example: Attempt(0, 1, 1, 1, (0, 8), {...})."""

    number: int
    rollout_workers: int
    rollout_shards: int
    """Number of shards in each step that this attempt plans."""
    training_ranks: int
    validations: tuple[int, ...]
    """Policy versions to validate, in ascending order."""
    settings: Mapping[str, Any]
    """The settings that `in_force` applies, keyed by dotted key."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """All that differs from run.json; see `pipeline.run.description.changed`."""
    inputs_since: int = 0
    """The first attempt that used the same inputs."""
    reason: str = ""
    """What this attempt changed, and why it may, as one line; empty if it changed nothing."""

    def body(self) -> dict[str, Any]:
        """Return the fields of the attempt's commit object."""
        return {
            "number": self.number,
            "rollout_workers": self.rollout_workers,
            "rollout_shards": self.rollout_shards,
            "training_ranks": self.training_ranks,
            "validations": list(self.validations),
            "changes": self.changes,
            "inputs_since": self.inputs_since,
            "reason": self.reason,
            **{_stored_name(key): self.settings[key.name] for key in _worker_settings()},
        }


def config_of(run: RunDescription) -> RunConfig:
    """Return the typed settings in a run's description.

    Raises InputError for settings that this version of Retrace does not accept.
    """
    return read_stored(run.settings, f"{keys.run_json()} of the run {run.name!r}")


def in_force(config: RunConfig, attempt: Attempt) -> RunConfig:
    """Return the run's settings with the operational settings of an attempt.

    Raises CorruptObjectError if the attempt contains invalid values.
    """
    settings = with_settings(config.model_dump(mode="json"), attempt.settings)
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        raise CorruptObjectError(
            f"{keys.attempt(attempt.number)}: invalid settings: {error}; restore the object"
        ) from error


def read_attempt(store: Store, number: int) -> Attempt:
    """Read an attempt. Raises ObjectMissingError and CorruptObjectError."""
    key = keys.attempt(number)
    return parse_attempt(read_commit(store, key), key, store.uri)


def parse_attempt(body: Mapping[str, Any], key: str, uri: str) -> Attempt:
    """Parse an attempt's commit object, ignoring unknown keys.

    Args:
        body: The stored object.
        key: Its key, for error messages.
        uri: The store's URI, for error messages.

    Raises:
        CorruptObjectError: A field is missing or invalid; the message names it.
    """
    try:
        return Attempt(
            number=typed(body, "number", Count),
            rollout_workers=typed(body, "rollout_workers", Count),
            rollout_shards=typed(body, "rollout_shards", Count),
            training_ranks=typed(body, "training_ranks", Count),
            validations=typed(body, "validations", tuple[Count, ...]),
            settings={key.name: typed(body, _stored_name(key), Any) for key in _worker_settings()},
            changes=typed(body, "changes", dict[str, Any]),
            inputs_since=typed(body, "inputs_since", Count),
            reason=typed(body, "reason", str),
        )
    except ValueError as error:
        raise CorruptObjectError(
            f"{key} in {uri}: not an attempt: {error}; restore the object"
        ) from error


@dataclass(frozen=True)
class Change:
    """What a start changes in its run. Example: Change({'trainer.nnodes': 2}, 'the layout (...)').

    It is decided before the attempt begins, after all earlier ones have ended.
    """

    changes: Mapping[str, Any]
    """See `Attempt.changes`; only what this start changes."""
    reason: str

    @property
    def inputs(self) -> bool:
        """Whether the start stages an input again on which the samples of steps depend."""
        others = {f"{INPUTS}val_prompts", f"{INPUTS}functions"}
        return any(name.startswith(INPUTS) for name in self.changes.keys() - others)


@dataclass(frozen=True)
class Claim:
    """An attempt that this process owns. It may start the attempt's workers or attach to them."""

    attempt: Attempt
    continued: bool
    """Whether an earlier pod of the same flow run began the attempt; its workers may be running."""
    is_lost: Callable[[], bool] = lambda: False
    """Returns whether another start took this one for dead and ended the attempt."""


@contextlib.contextmanager
def claimed(
    store: Store,
    config: RunConfig,
    me: Owner,
    is_over: IsOver | None = None,
    show: Callable[[str], None] = _ignore,
    change: Callable[[], Change | None] = lambda: None,
) -> Iterator[Claim]:
    """Own the newest attempt of a run during the block; no other process starts workers meanwhile.

    Continues the running attempt of the same flow run, or ends what dead owners left behind and
    begins a new attempt. Gives signs of life during the block. If the block fails, the attempt is
    ended, but not if the pod of a flow run is moved or killed.

    Args:
        store: The run.
        config: The settings of the attempt to begin.
        me: The owner of the attempt to begin.
        is_over: Asks Prefect's server about other flow runs; None if there is no such server here.
        show: Shows that this function waits for a sign of life.
        change: Decides what the attempt changes in the run; None: nothing.

    Raises:
        InputError: Another owner of a running attempt is alive, or the run cannot continue with
            these settings. No attempt was begun.
    """
    claim = take_attempt(store, config, me, is_over, show, change)
    attempt = claim.attempt
    with signs_of_life(store, attempt.number) as was_stopped:
        try:
            yield replace(claim, is_lost=was_stopped)
        except BaseException as error:
            failed = isinstance(error, Exception)
            if not isinstance(error, StoreError) and (failed or me.flow_run is None):
                with contextlib.suppress(StoreError):
                    reason = "failed" if failed else "cancelled"
                    end_attempt(store, attempt, reason, str(error))
            raise


def take_attempt(
    store: Store,
    config: RunConfig,
    me: Owner,
    is_over: IsOver | None = None,
    show: Callable[[str], None] = _ignore,
    change: Callable[[], Change | None] = lambda: None,
) -> Claim:
    """Begin or continue an attempt, as `claimed` does, without signs of life.

    Args:
        store: The run.
        config: The settings of the attempt to begin.
        me: The owner of the attempt to begin.
        is_over: Asks Prefect's server about other flow runs.
        show: Shows that this function waits for a sign of life.
        change: Decides what the attempt changes in the run.

    Raises:
        InputError: Another owner of a running attempt is alive.
    """
    while True:
        number = attempt_count(store)
        for running, owner in _running(store):
            if running == number - 1 and owner is not None and me.continues(owner):
                return Claim(read_attempt(store, running), continued=True)
        end_attempts(store, config, me, is_over, show)
        attempt = _changed(store, attempt_of(config, number), change())
        body = attempt.body() | {"owner": owner_json(me)}
        if commit(store, keys.attempt(number), body, new_write_id()).ours:
            return Claim(attempt, continued=False)
        # Another process took the number first. The next iteration looks at that process.


def _changed(store: Store, attempt: Attempt, change: Change | None) -> Attempt:
    """Return a new attempt with the changes of the one before it, and with its own."""
    if attempt.number:
        last = read_attempt(store, attempt.number - 1)
        attempt = replace(attempt, changes=last.changes, inputs_since=last.inputs_since)
    if change is None:
        return attempt
    return replace(
        attempt,
        changes={**attempt.changes, **change.changes},
        inputs_since=attempt.number if change.inputs else attempt.inputs_since,
        reason=change.reason,
    )


def end_attempts(
    store: Store,
    config: RunConfig,
    me: Owner,
    is_over: IsOver | None = None,
    show: Callable[[str], None] = _ignore,
) -> None:
    """End every running attempt of a run that a dead owner, or an earlier pod of `me`, began.

    Args:
        store: The run.
        config: The run's settings, for error messages.
        me: The owner that ends the attempts; the attempt that it began itself continues.
        is_over: Asks Prefect's server about other flow runs.
        show: Shows that this function waits for a sign of life.

    Raises:
        InputError: Another owner of a running attempt is alive. No attempt was ended.
    """
    others = [(number, owner) for number, owner in _running(store) if owner != me]
    for number, owner in others:
        if owner is None or me.continues(owner):
            continue
        if is_alive(store, number, owner, is_over, show):
            raise InputError([_at_work(config, owner)])
    for number, owner in others:
        who = "its owner" if owner is None else str(owner)
        end_attempt(store, read_attempt(store, number), "cancelled", f"{who} has ended")
        remove_signs(store, number)


def _running(store: Store) -> list[tuple[int, Owner | None]]:
    """Return the attempts without a stop object, in ascending order, with their owners."""
    there = {info.key for info in store.list(keys.attempts())}
    found: list[tuple[int, Owner | None]] = []
    for key in sorted(there):
        number = keys.attempt_number(key)
        if number is not None and keys.stop(number) not in there:
            with parsing(store, key):
                found.append((number, owner_of(read_commit(store, key))))
    return found


def _at_work(config: RunConfig, owner: Owner) -> str:
    since = f" since {owner.since}" if owner.since else ""
    end = "cancel it" if owner.flow_run is not None else "end it there (Ctrl-C)"
    return (
        f"trainer.experiment_name: the run {config.trainer.run_name!r} is already running{since} "
        f"in {owner}; watch it with `retrace logs {config.run_uri} -f`, {end}, or choose a "
        "different name"
    )


def attempt_of(config: RunConfig, number: int) -> Attempt:
    """Return an attempt with the given number and a config's operational settings."""
    launch, trainer = config.launch, config.trainer
    replayed = config.actor_rollout_ref.actor.router_replay.replay_file is not None
    workers = launch.rollout_workers
    if workers is None:
        workers = 0 if replayed else 1
    return Attempt(
        number=number,
        rollout_workers=workers,
        rollout_shards=launch.rollout_shards or max(1, workers),
        training_ranks=trainer.nnodes * trainer.n_gpus_per_node,
        validations=validations_of(config),
        settings={key.name: value_at(config, key.name) for key in _worker_settings()},
    )


def validations_of(config: RunConfig) -> tuple[int, ...]:
    """Return the policy versions to validate.

    These are version 0 (val_before_train), every test_freq-th version, and the last version.
    """
    trainer = config.trainer
    if config.data.val_files is None:
        return ()
    last = trainer.total_training_steps
    versions = {last}
    if trainer.val_before_train:
        versions.add(0)
    if trainer.test_freq > 0:
        versions.update(range(trainer.test_freq, last, trainer.test_freq))
    return tuple(sorted(versions))


def end_attempt(store: Store, attempt: Attempt, reason: str, message: str) -> dict[str, Any]:
    """End an attempt, so that its workers exit.

    Args:
        store: The run.
        attempt: The attempt to end.
        reason: 'finished', 'failed' or 'cancelled'.
        message: Free text for human readers.

    Returns:
        The stored object; if another process ended the attempt first, the object that it wrote.
    """
    body = {"reason": reason, "message": message}
    return commit(store, keys.stop(attempt.number), body, new_write_id()).body


def has_finished(store: Store, number: int) -> bool:
    """Return whether an attempt ended because the run was finished."""
    stop = find_commit(store, keys.stop(number))
    return stop is not None and stop.get("reason") == "finished"


def _worker_settings() -> list[Key]:
    return [key for key in setting_keys() if key.for_workers]


def _stored_name(key: Key) -> str:
    return key.name.rpartition(".")[2]
