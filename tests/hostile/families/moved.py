"""Objects that are lost, swapped, or taken from another step, shard or run; training sets."""

import json
from collections.abc import Iterator

from pipeline.run import keys
from tests.hostile.case import FREE, NAMED, Case, Changes, title
from tests.hostile.remake import remade
from tests.hostile.worlds import WITH_TWINS, Objects, twin, world

_OF_STEP = keys.step_prefix(0)
_TRAINING = keys.trainings(0)


def cases(name: str) -> Iterator[Case]:
    """Yield cases with a world's objects lost, swapped, or replaced by those of its twins."""
    objects = world(name)
    needed = [key for key in sorted(objects) if key.startswith("steps/")]
    for key in needed:
        yield Case(
            f"moved/{name}:{title(key)}/lost/L0",
            name,
            lambda key=key: {key: None},
            FREE if may_be_absent(key, objects) else NAMED,
        )
    movable = [*needed, *(key for key in sorted(objects) if key.startswith("validations/"))]
    for key in movable:
        for other in movable:
            if key < other and _alike(key) == _alike(other):
                for level in ("L0", "L1"):
                    yield Case(
                        f"moved/{name}:{title(key)}/swapped with {title(other)}/{level}",
                        name,
                        lambda pair=(key, other), level=level: _swapped(objects, pair, level),
                    )
    if name in WITH_TWINS:
        yield from _of_twins(name)
    if name.startswith("r2"):
        yield from _sets(name)


def _of_twins(name: str) -> Iterator[Case]:
    for tokens, whose in ((False, "another run's routes"), (True, "another run's")):
        for key in sorted(world(name)):
            if not key.startswith(_OF_STEP) or key.endswith(("plan.json", "metrics.json")):
                continue
            for level in ("L0", "L1"):
                yield Case(
                    f"moved/{name}:{title(key)}/{whose}/{level}",
                    name,
                    lambda key=key, tokens=tokens, level=level: _of_twin(
                        name, [key], tokens, level
                    ),
                )


def _of_twin(name: str, wanted: list[str], tokens: bool, level: str) -> Changes | None:
    objects, other = world(name), twin(name, tokens)
    changes = {key: other[key] for key in wanted if key in other and other[key] != objects[key]}
    if not changes:
        return None
    return changes if level == "L0" else remade(objects, changes)


def _sets(name: str) -> Iterator[Case]:
    """Yield changes to the training set: parts lost, replaced or duplicated."""
    objects = world(name)
    all_ = [key for key in sorted(objects) if key.startswith(_TRAINING)]
    root = [key for key in objects if key == _OF_STEP + "training.json"]
    stage = {n: [key for key in all_ if key.startswith(f"{_TRAINING}{n:03d}-")] for n in (0, 1)}
    rank = [key for key in all_ if "-00001" in key]
    commits = [key for key in all_ if key.endswith(".json")]
    files = [key for key in all_ if not key.endswith(".json")]
    lost = {
        "all": [*all_, *root],
        "all but training.json": all_,
        "training.json": root,
        "stage 0": stage[0],
        "stage 1": stage[1],
        "rank 1": rank,
        "commits": commits,
        "files": files,
        "one commit": commits[:1],
        "one file": files[-1:],
        "one commit and its file": stage[1][:2],
    }
    for what, gone in lost.items():
        if gone:
            yield Case(
                f"set/{name}:training/{what} lost/L0", name, lambda gone=gone: dict.fromkeys(gone)
            )
            yield Case(
                f"set/{name}:training/{what} lost/L1",
                name,
                lambda gone=gone: _unlisted(objects, gone),
            )
    if name != "r2":
        return
    parts = {
        "all": [*all_, *root],
        "all but training.json": all_,
        "stage 0": stage[0],
        "stage 1": stage[1],
        "rank 1": rank,
        "commits": commits,
        "files": files,
        "training.json": root,
    }
    for tokens, whose in ((False, "another run's routes"), (True, "another run's")):
        for what, wanted in parts.items():
            for level in ("L0", "L1"):
                if wanted:
                    yield Case(
                        f"set/{name}:training/{what} of {whose}/{level}",
                        name,
                        lambda wanted=wanted, tokens=tokens, level=level: _of_twin(
                            name, wanted, tokens, level
                        ),
                    )
    for number, key in enumerate(commits):
        yield Case(
            f"set/{name}:training/{title(key).rsplit('/', 1)[-1]} twice/L0",
            name,
            lambda key=key: _twice(objects, key),
            FREE,
        )
        yield Case(
            f"set/{name}:training/{title(key).rsplit('/', 1)[-1]} listed twice/L1",
            name,
            lambda number=number: _listed_twice(objects, number),
        )
    for what in ("false, set lost", "false", "missing"):
        yield Case(
            f"set/{name}:manifest.json/training {what}/L1",
            name,
            lambda what=what: _mode(objects, what, [*all_, *root]),
        )


def _unlisted(objects: Objects, gone: list[str]) -> Changes | None:
    """Remove objects, and their entries in training.json."""
    key = _OF_STEP + "training.json"
    changes: dict[str, bytes | None] = dict.fromkeys(gone)
    if key not in objects or key in gone:
        return None
    body = json.loads(objects[key])
    body["commits"] = [ref for ref in body["commits"] if ref["key"] not in gone]
    return {**changes, **remade(objects, {key: json.dumps(body).encode()})}


def _twice(objects: Objects, key: str) -> Changes:
    """Repeat a commit under another write id, as a second attempt at the step would leave it."""
    parts = key.split(".")
    parts[-2:-1] = ["0000beef"] if len(parts) > 2 else [parts[-2], "0000beef"]
    return {".".join(parts): objects[key]}


def _listed_twice(objects: Objects, number: int) -> Changes | None:
    key = _OF_STEP + "training.json"
    if key not in objects:
        return None
    body = json.loads(objects[key])
    body["commits"].append(body["commits"][number])
    return dict(remade(objects, {key: json.dumps(body).encode()}))


def _mode(objects: Objects, what: str, training: list[str]) -> Changes | None:
    """Change the manifest so that it expects no training set, or lacks the field for it."""
    key = keys.manifest(0)
    body = json.loads(objects[key])
    if "training" not in body:
        return None
    body["training"] = False
    if what == "missing":
        del body["training"]
    lost = dict.fromkeys(training) if what.endswith("lost") else {}
    return {**remade(objects, {key: json.dumps(body).encode()}), **lost}


def _swapped(objects: Objects, pair: tuple[str, str], level: str) -> Changes | None:
    one, two = pair
    if objects[one] == objects[two]:
        return None
    changes = {one: objects[two], two: objects[one]}
    return changes if level == "L0" else remade(objects, changes)


def _alike(key: str) -> str:
    """Return the kind of an object; objects of the same kind are swapped with each other."""
    room, _, *folder = key.split("/")[:-1]
    folder, name = [room, *folder], key.rsplit("/", 1)[-1].split(".")
    return (
        "/".join([*folder, *name[-2:]])
        if name[-1] == "parquet"
        else "/".join([*folder, "" if name[0][:1].isdigit() else name[0]])
    )


def may_be_absent(key: str, objects: Objects) -> bool:
    """Return whether a store without this object of a step is complete or may be unfinished.

    The last step's metrics and a recorded set's plans are optional. If its manifest is missing, the
    last step of a set without plans looks the same as while a library user is writing it.
    """
    step = keys.folder_number(key) or 0
    if key == keys.metrics(step):
        return keys.metrics(step + 1) not in objects
    if keys.run_json() in objects:
        return False
    if key == keys.manifest(step):
        return keys.plan(step) not in objects and keys.manifest(step + 1) not in objects
    return key.endswith("plan.json")
