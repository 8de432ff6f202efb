"""run.json: its stored form, and the errors for a broken run.json."""

from dataclasses import replace

import pytest

from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, DataFile, commit, read_commit
from pipeline.run.description import (
    RunDescription,
    StagedInputs,
    create_description,
    description_json,
    read_created,
    with_settings,
)
from pipeline.store import ObjectMissingError, open_store

FILES = [DataFile(f"inputs/{i}/file", i, str(i) * 64) for i in range(4)]
RUN = RunDescription(
    name="made",
    settings={"trainer": {"seed": 3}, "custom_reward_function": None},
    inputs=StagedInputs(FILES[0], FILES[1], FILES[2], {"config.json": FILES[3]}),
    geometry=Geometry(16, 4, (1, 2)),
    versions={"retrace": "0.1.0"},
)


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path))


def test_the_stored_form_is_that_of_existing_runs(store):
    assert create_description(store, RUN) == RUN == read_created(store)
    body = read_commit(store, "run.json")
    assert {name: body[name] for name in body if name not in ("attempt", "content_sha256")} == {
        "format": 1,
        "name": "made",
        "config": RUN.settings,
        "inputs": {
            "prompts": vars(FILES[0]),
            "val_prompts": vars(FILES[1]),
            "reward": vars(FILES[2]),
            "model": {"config.json": vars(FILES[3])},
            "functions": {},
        },
        "geometry": {"experts": 16, "topk": 4, "layers": [1, 2]},
        "versions": {"retrace": "0.1.0"},
    }


def test_a_run_may_have_no_validation_no_reward_file_and_no_routes(store):
    plain = replace(RUN, inputs=replace(RUN.inputs, val_prompts=None, reward=None), geometry=None)
    assert create_description(store, plain) == plain
    assert plain.inputs.files() == [FILES[0], FILES[3]]


def test_the_first_description_remains(store):
    create_description(store, RUN)
    assert create_description(store, replace(RUN, name="other")) == RUN


def test_reading_fails_without_a_run(store):
    with pytest.raises(ObjectMissingError):
        read_created(store)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "format 2, expected 1"),
        ({"inputs": {"prompts": {"key": "a", "size": 1}}}, "sha256.*inputs.prompts"),
        ({"geometry": {"experts": 16}}, "expected an object with experts, topk and layers"),
    ],
)
def test_a_broken_description_is_refused(store, change, says):
    commit(store, keys.run_json(), {**description_json(RUN), **change}, "a")
    with pytest.raises(CorruptObjectError, match=f"run.json in .*: .*{says}"):
        read_created(store)


def test_a_setting_is_read_by_its_dotted_key():
    assert RUN.setting("trainer.seed") == 3
    for name in ("trainer.nnodes", "custom_reward_function.path", "x"):
        with pytest.raises(CorruptObjectError, match=f"{name} is missing"):
            RUN.setting(name)


def test_settings_are_changed_in_a_copy():
    changed = with_settings(RUN.settings, {"trainer.seed": 4, "new.group.key": [1]})
    assert changed["trainer"] == {"seed": 4}
    assert changed["new"] == {"group": {"key": [1]}}
    assert RUN.setting("trainer.seed") == 3
    with pytest.raises(ValueError, match="seed is 3, not a group of settings"):
        with_settings(RUN.settings, {"trainer.seed.x": 1})
