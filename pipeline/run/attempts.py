"""One start of a run: its operational settings in the store, and the object that ends it.

    settings of the flow ─► attempts/NNN.json ─► in_force(run's settings) ─► settings of workers

The settings themselves mark what may change between attempts. Those that workers read are stored
with the attempt, under the last part of their dotted key.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from pipeline.config.keys import Key, setting_keys, value_at
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.run import keys, parse
from pipeline.run.commit import CorruptObjectError, commit, new_write_id, read_commit
from pipeline.run.description import with_settings
from pipeline.store import Store


@dataclass(frozen=True)
class Attempt:
    """One start of a run, for its workers. Example: Attempt(0, 1, 1, 1, (0, 8), {...})."""

    number: int
    rollout_workers: int
    rollout_shards: int
    """Number of shards in each step that this attempt plans."""
    training_ranks: int
    validations: tuple[int, ...]
    """Policy versions to validate, ascending."""
    settings: Mapping[str, Any]
    """The settings that `in_force` overlays, by dotted key."""

    def body(self) -> dict[str, Any]:
        """The attempt's fields in the commit object."""
        return {
            "number": self.number,
            "rollout_workers": self.rollout_workers,
            "rollout_shards": self.rollout_shards,
            "training_ranks": self.training_ranks,
            "validations": list(self.validations),
            **{_stored_name(key): self.settings[key.name] for key in _worker_settings()},
        }


def in_force(config: RunConfig, attempt: Attempt) -> RunConfig:
    """A run's settings in an attempt: those of the run, with the attempt's operational ones.

    Raises CorruptObjectError when the attempt has values that the settings cannot have.
    """
    settings = with_settings(config.model_dump(mode="json"), attempt.settings)
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        raise CorruptObjectError(
            f"{keys.attempt(attempt.number)}: settings that cannot be: {error}; restore the object"
        ) from error


def read_attempt(store: Store, number: int) -> Attempt:
    """Read an attempt. Raises ObjectMissingError, CorruptObjectError."""
    key = keys.attempt(number)
    return parse_attempt(read_commit(store, key), key, store.uri)


def parse_attempt(body: Mapping[str, Any], key: str, uri: str) -> Attempt:
    """Parse an attempt's commit object; unknown keys are ignored.

    Raises CorruptObjectError, naming what is missing or wrong.
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
    """Write attempts/NNN.json with the next free number. The attempt ends with its process."""
    number = attempt_count(store)
    while (attempt := _take(store, config, number, None)) is None:
        number += 1
    return attempt


def continue_attempt(
    owner: str, is_over: Callable[[str], bool], store: Store, config: RunConfig
) -> Attempt:
    """Return the running attempt of the flow run `owner`, or begin a new one for it.

    The attempt of another flow run is ended first if `is_over` for it. Raises InputError while that
    flow run is not over: a run has one flow at a time.
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
        # Another flow run took the number first: look at its attempt.


def end_attempts(store: Store) -> None:
    """End every attempt of a run that has not ended: its workers must make nothing any more.

    For flows of one machine, whose workers end with them: one that was killed left no stop object.
    """
    for number in range(attempt_count(store)):
        if store.size(keys.stop(number)) is None:
            attempt = read_attempt(store, number)
            end_attempt(store, attempt, "cancelled", "the run is amended by a later start")


def end_attempts_of(
    config: RunConfig, owner: str, is_over: Callable[[str], bool], store: Store
) -> None:
    """Do the same for the flow run `owner`, whose own attempt is ended too.

    Raises InputError while another flow run is not over.
    """
    for number in range(attempt_count(store)):
        other = read_commit(store, keys.attempt(number)).get("owner")
        ended = store.size(keys.stop(number)) is not None
        if not ended and other not in (None, owner) and not is_over(other):
            raise InputError([_at_work(config, other)])
    end_attempts(store)


def _take(store: Store, config: RunConfig, number: int, owner: str | None) -> Attempt | None:
    """Write the attempt with this number; None: another process has written it."""
    attempt = attempt_of(config, number)
    body = attempt.body() | {"owner": owner}
    return attempt if commit(store, keys.attempt(number), body, new_write_id()).ours else None


def _at_work(config: RunConfig, flow_run: str) -> str:
    return (
        f"trainer.experiment_name: the run {config.trainer.run_name!r} is at work in flow "
        f"run {flow_run}; wait for it, cancel it, or choose another name"
    )


def attempt_count(store: Store) -> int:
    """How many attempts a run has had."""
    return sum(1 for info in store.list(keys.attempts()) if not info.key.endswith(".stop.json"))


def attempt_of(config: RunConfig, number: int) -> Attempt:
    """The attempt that follows from a config."""
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
    """Versions to validate: 0 (val_before_train), every test_freq-th, and the last."""
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
    """Make the attempt's workers exit; reason is 'finished', 'failed' or 'cancelled'."""
    body = {"reason": reason, "message": message}
    return commit(store, keys.stop(attempt.number), body, new_write_id()).body


def _worker_settings() -> list[Key]:
    return [key for key in setting_keys() if key.for_workers]


def _stored_name(key: Key) -> str:
    return key.name.rpartition(".")[2]


def _stored_value(body: Mapping[str, Any], key: Key) -> Any:
    name = _stored_name(key)
    if name not in body and key.is_new:
        return key.former  # an older version's flow is at work
    return parse.field(body, name, lambda value: value)


def _versions(value: Any) -> tuple[int, ...]:
    return tuple(parse.number(version) for version in parse.items(value))
