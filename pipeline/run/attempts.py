"""An attempt of a run: its operational settings in the store, and the object that ends it.

    settings of the flow ─► attempts/NNN.json ─► in_force(run's settings) ─► settings of workers

The settings tree marks the settings that may change between attempts. Of these, the attempt's
object stores the settings that workers read, each under the last part of its dotted key.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from pipeline.config.keys import Key, setting_keys, value_at
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.run import keys, parse
from pipeline.run.commit import CorruptObjectError, commit, find_commit, new_write_id, read_commit
from pipeline.run.description import with_settings
from pipeline.run.restarts import attempt_count
from pipeline.store import Store


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

    def body(self) -> dict[str, Any]:
        """Return the fields of the attempt's commit object."""
        return {
            "number": self.number,
            "rollout_workers": self.rollout_workers,
            "rollout_shards": self.rollout_shards,
            "training_ranks": self.training_ranks,
            "validations": list(self.validations),
            **{_stored_name(key): self.settings[key.name] for key in _worker_settings()},
        }


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
            number=parse.field(body, "number", parse.number),
            rollout_workers=parse.field(body, "rollout_workers", parse.number),
            rollout_shards=parse.field(body, "rollout_shards", parse.number),
            training_ranks=parse.field(body, "training_ranks", parse.number),
            validations=parse.field(body, "validations", _versions),
            settings={one.name: _stored_value(body, one) for one in _worker_settings()},
        )
    except ValueError as error:
        raise CorruptObjectError(
            f"{key} in {uri}: not an attempt: {error}; restore the object"
        ) from error


def begin_attempt(store: Store, config: RunConfig) -> Attempt:
    """Write attempts/NNN.json with the next free number, for a flow with local workers.

    The attempt has no owner, because these workers end when the flow's process ends.
    """
    number = attempt_count(store)
    while (attempt := _take(store, config, number, None)) is None:
        number += 1
    return attempt


def continue_attempt(
    owner: str, is_over: Callable[[str], bool], store: Store, config: RunConfig
) -> Attempt:
    """Return the running attempt of the flow run `owner`, or begin a new attempt for it.

    A run has one flow at a time. If the running attempt belongs to another flow run, and that flow
    run is over, this function first ends the attempt.

    Args:
        owner: Id of the flow run.
        is_over: Returns whether the flow run with a given id is over.
        store: The run.
        config: The settings of the attempt to begin.

    Raises:
        InputError: Another flow run owns the running attempt and is not over.
    """
    while True:
        newest = attempt_count(store) - 1
        if newest >= 0 and store.size(keys.stop(newest)) is None:
            body = read_commit(store, keys.attempt(newest))
            attempt = parse_attempt(body, keys.attempt(newest), store.uri)
            other = body.get("owner")
            if other == owner:
                return attempt
            if other is not None:
                if not is_over(other):
                    raise InputError([_at_work(config, other)])
                end_attempt(store, attempt, "cancelled", f"flow run {other} is over")
        taken = _take(store, config, newest + 1, owner)
        if taken is not None:
            return taken
        # Another process took the number first. The next iteration checks that process's attempt.


def end_attempts(store: Store) -> None:
    """End every running attempt of a run, so that the run's workers stop.

    Flows that run on one machine call this function, because a killed flow leaves its attempt
    without a stop object. The workers of a killed flow have ended with it.
    """
    for number in range(attempt_count(store)):
        if store.size(keys.stop(number)) is None:
            attempt = read_attempt(store, number)
            end_attempt(store, attempt, "cancelled", "the run is amended by a later start")


def end_attempts_of(
    config: RunConfig, owner: str, is_over: Callable[[str], bool], store: Store
) -> None:
    """End every running attempt of a run on behalf of the flow run `owner`.

    `owner` may have begun some of these attempts itself.

    Args:
        config: The run's settings, for error messages.
        owner: Id of the flow run.
        is_over: Returns whether the flow run with a given id is over.
        store: The run.

    Raises:
        InputError: Another flow run owns a running attempt and is not over.
    """
    for number in range(attempt_count(store)):
        if store.size(keys.stop(number)) is not None:
            continue
        other = read_commit(store, keys.attempt(number)).get("owner")
        if other not in (None, owner) and not is_over(other):
            raise InputError([_at_work(config, other)])
    end_attempts(store)


def _take(store: Store, config: RunConfig, number: int, owner: str | None) -> Attempt | None:
    """Write the attempt with this number; return None if another process wrote it first."""
    attempt = attempt_of(config, number)
    body = attempt.body() | {"owner": owner}
    return attempt if commit(store, keys.attempt(number), body, new_write_id()).ours else None


def _at_work(config: RunConfig, flow_run: str) -> str:
    return (
        f"trainer.experiment_name: the run {config.trainer.run_name!r} is in progress in "
        f"flow run {flow_run}; wait for the flow run, cancel it, or choose a different name"
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


def _stored_value(body: Mapping[str, Any], key: Key) -> Any:
    name = _stored_name(key)
    if name not in body and key.is_new:
        return key.former  # an older version of Retrace wrote the attempt
    return parse.field(body, name, lambda value: value)


def _versions(value: Any) -> tuple[int, ...]:
    return tuple(parse.number(version) for version in parse.items(value))
