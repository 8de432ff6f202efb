"""amendments/NNN.json: changes that later attempts made to a run's description, with reasons.

run.json is written once. If an attempt continues the run with corrected inputs, or with different
values of settings that belong to the run's identity, it writes an amendment before its workers
start. The amendment does not affect finished work: the earlier description still applies to the
steps before `from_step`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeline.run import keys
from pipeline.run.commit import (
    CorruptObjectError,
    DataFile,
    commit,
    new_write_id,
    parse_file,
    read_commit,
)
from pipeline.run.description import (
    RunDescription,
    parse_files,
    parse_optional_file,
    read_created,
    with_settings,
)
from pipeline.run.parse import field, mapping, number, text
from pipeline.store.base import ObjectMissingError, Store, StoreError

_INPUTS = "inputs."
_MOST_PARTS = 16
"""Maximum number of parts in a setting's dotted key. Deeper settings could not be printed."""
_AMENDABLE: Mapping[str, Callable[[Any], Any]] = {
    "prompts": parse_file,
    "val_prompts": parse_optional_file,
    "reward": parse_optional_file,
    "model": parse_files,
    "functions": parse_files,
}


class AmendedError(StoreError):
    """The run was amended after this worker read the description. The worker must not commit."""


@dataclass(frozen=True)
class Amendment:
    """A change to a run's description. Example: Amendment(0, 'reward fixed', 12, {...})."""

    number: int
    reason: str
    """Free text."""
    from_step: int
    """The first step to which the changes apply."""
    changes: Mapping[str, Any]
    """New values, keyed by the dotted key of a setting, such as trainer.nnodes, or by the name of
    an input, such as inputs.prompts.

    The value of inputs.prompts is a staged file (DataFile). The value of inputs.val_prompts or
    inputs.reward is a staged file or None. The value of inputs.model or inputs.functions is a
    mapping of staged files, keyed by name."""

    def files(self) -> list[DataFile]:
        """Return the staged files among the changes."""
        found: list[DataFile] = []
        for name in self.inputs:
            value = self.changes[_INPUTS + name]
            found += (
                value.values()
                if name in ("model", "functions")
                else []
                if value is None
                else [value]
            )
        return found

    @property
    def inputs(self) -> frozenset[str]:
        """The names of the changed inputs, as in StagedInputs."""
        names = (name for name in self.changes if name.startswith(_INPUTS))
        return frozenset(name.removeprefix(_INPUTS) for name in names)


def description_at(store: Store, step: int) -> RunDescription:
    """Read the description of the run that applies to a step.

    Raises ObjectMissingError if the run does not exist. Also raises CorruptObjectError.
    """
    amendments = [one for one in read_amendments(store) if one.from_step <= step]
    return amended(read_created(store), amendments)


def description_now(store: Store) -> RunDescription:
    """Read the run's description with all amendments, as attempts and workers use it.

    Raises ObjectMissingError if the run does not exist. Also raises CorruptObjectError.
    """
    return amended(read_created(store), read_amendments(store))


def find_description(store: Store) -> RunDescription | None:
    """Read the same description as `description_now`; return None if the run does not exist.

    Raises CorruptObjectError.
    """
    try:
        return description_now(store)
    except ObjectMissingError:
        return None


def read_amendments(store: Store) -> list[Amendment]:
    """Read all amendments, in ascending order.

    Raises CorruptObjectError if an amendment is damaged, or if one is missing although a later one
    exists.
    """
    found: list[Amendment] = []
    for info in store.list(keys.amendments()):
        key = keys.amendment(len(found))
        if info.key != key:
            raise CorruptObjectError(
                f"{key} in {store.uri}: no such object, but {info.key} exists; restore it"
            )
        found.append(parse_amendment(read_commit(store, key), found, store.uri))
    return found


def write_amendment(store: Store, amendment: Amendment) -> bool:
    """Write an amendment; return False if another process wrote one with the same number.

    The run's workers must have ended. Raises ValueError for an amendment that readers would refuse.
    Also raises ValueError if a step before `from_step` is not sealed yet, because an attempt has
    only one description, which must apply to all steps that the attempt produces.
    """
    from_step = amendment.from_step
    if from_step and store.size(keys.manifest(from_step - 1)) is None:
        raise ValueError(f"from_step {from_step}: step {from_step - 1} is not sealed yet")
    body = {
        "number": amendment.number,
        "reason": amendment.reason,
        "from_step": from_step,
        "changes": {name: _stored(value) for name, value in amendment.changes.items()},
    }
    earlier = read_amendments(store)[: amendment.number]
    try:
        amended(read_created(store), [*earlier, parse_amendment(body, earlier, store.uri)])
    except CorruptObjectError as error:
        raise ValueError(str(error)) from error
    return commit(store, keys.amendment(amendment.number), body, new_write_id()).ours


def refuse_amended(store: Store, amendments: int) -> None:
    """Raise AmendedError if the run has more than `amendments` amendments.

    Workers call this function right before a commit, with the number of amendments that existed
    when they started. The check is needed because a worker may not have noticed that its attempt
    has ended.
    """
    key = keys.amendment(amendments)
    if store.size(key) is not None:
        raise AmendedError(
            f"{key} in {store.uri}: a later start of the run, which has its own workers, amended "
            "the run after this worker had started; nothing more is committed here"
        )


def amended(run: RunDescription, amendments: Iterable[Amendment]) -> RunDescription:
    """Apply amendments to a description, in order. Raises CorruptObjectError."""
    for one in amendments:
        inputs = {name: value for name, value in one.changes.items() if name.startswith(_INPUTS)}
        settings = {name: value for name, value in one.changes.items() if name not in inputs}
        staged = {name.removeprefix(_INPUTS): value for name, value in inputs.items()}
        try:
            run = replace(
                run,
                settings=with_settings(run.settings, settings),
                inputs=replace(run.inputs, **staged),
            )
        except ValueError as error:
            raise CorruptObjectError(f"{keys.amendment(one.number)}: changes: {error}") from error
    return run


def parse_amendment(body: Mapping[str, Any], earlier: list[Amendment], uri: str) -> Amendment:
    """Parse an amendment.

    Args:
        body: The stored object.
        earlier: All amendments with lower numbers.
        uri: The store's URI, for error messages.

    Raises:
        CorruptObjectError: The object is not the amendment that follows the earlier ones.
    """
    key = keys.amendment(len(earlier))
    try:
        found = Amendment(
            number=field(body, "number", number),
            reason=field(body, "reason", text),
            from_step=field(body, "from_step", number),
            changes=field(body, "changes", _changes),
        )
        if found.number != len(earlier):
            raise ValueError(f"number {found.number}, expected {len(earlier)}")
        if not found.reason or not found.changes:
            raise ValueError("reason or changes are empty")
        if earlier and found.from_step < earlier[-1].from_step:
            raise ValueError(
                f"from_step {found.from_step}, expected at least {earlier[-1].from_step}, as in "
                f"{keys.amendment(earlier[-1].number)}"
            )
    except ValueError as error:
        raise CorruptObjectError(
            f"{key} in {uri}: not an amendment: {error}; restore the object"
        ) from error
    return found


def _changes(value: Any) -> dict[str, Any]:
    body = mapping(value)
    return {name: field(body, name, _parser(name)) for name in body}


def _parser(name: str) -> Callable[[Any], Any]:
    if (parts := name.count(".") + 1) > _MOST_PARTS:
        raise ValueError(f"a name of {parts} parts, expected at most {_MOST_PARTS}")
    if not name.startswith(_INPUTS):
        return lambda value: value
    if name.removeprefix(_INPUTS) not in _AMENDABLE:
        expected = ", ".join(_INPUTS + name for name in _AMENDABLE)
        raise ValueError(f"{name}: expected a setting or one of {expected}")
    return _AMENDABLE[name.removeprefix(_INPUTS)]


def _stored(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _stored(part) for name, part in value.items()}
    return asdict(value) if isinstance(value, DataFile) else value
