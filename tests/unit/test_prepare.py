"""Preparing a run: bad input is a clear error before anything starts, good input is staged once,
and the same name again attaches only to the same run."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from pipeline.config.errors import InputError
from pipeline.flows.inputs import check_inputs
from pipeline.flows.plan import make_plan
from pipeline.flows.prepare import Run, prepare, stage
from pipeline.flows.prompts import SCHEMA
from pipeline.store import keys, open_store
from pipeline.store.commit import DataFile, commit, new_attempt, read_commit, read_data
from pipeline.store.policy import fetch_policy
from pipeline.traces import (
    Geometry,
    Provenance,
    Routes,
    Sample,
    VersionSpan,
    expected_ids,
    sampling_seed,
    seal,
    write_shard,
)
from tests.tiny_models import make_tiny
from tests.unit.inputs import check, check_error, load, the_error, verl_rows, write_inputs
from tests.unit.inputs import write_prompts as write_parquet

REPLAY = "actor_rollout_ref.actor.router_replay"
R3 = (f"{REPLAY}.mode=R3", "actor_rollout_ref.rollout.enable_rollout_routing_replay=True")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"), "qwen3_moe_dense_first")


@pytest.fixture
def settings(tmp_path, model) -> Path:
    return write_inputs(tmp_path, model)


class TestStaging:
    def test_run_json(self, settings):
        """run.json holds the resolved config, every input by digest, and the routing's shape."""
        config = load(settings)
        run = prepare(config)
        body = read_commit(run.store, keys.run_json())
        assert body == run.body
        assert body["format"] == 1
        assert body["config"] == config.model_dump(mode="json")
        assert body["geometry"] == {"experts": 16, "topk": 4, "layers": [1, 2, 3]}
        assert run.geometry == Geometry(16, 4, (1, 2, 3))
        assert {"retrace", "python", "transformers"} <= set(body["versions"])
        assert (run.name, run.prompt_count, run.val_prompt_count) == ("test", 10, 0)
        assert run.uri == open_store(f"{settings.parent}/store/test").uri
        assert body["inputs"]["val_prompts"] is None
        reward = read_data(run.store, DataFile(**body["inputs"]["reward"]))
        assert reward == (settings.parent / "reward.py").read_bytes()

    def test_prompts(self, settings, model):
        """Token ids are those of transformers' AutoTokenizer with the generation prompt."""
        run = prepare(load(settings))
        data = read_data(run.store, DataFile(**run.body["inputs"]["prompts"]))
        table = pq.read_table(io.BytesIO(data))
        assert table.schema.equals(SCHEMA)
        tokenizer = AutoTokenizer.from_pretrained(model)
        for number, row in enumerate(table.to_pylist()):
            messages = verl_rows(10)[number]["prompt"]
            assert row["prompt_id"] == number
            assert json.loads(row["messages"]) == messages
            assert row["token_ids"] == tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            assert (row["data_source"], json.loads(row["ground_truth"])) == ("add", str(2 * number))
            assert json.loads(row["extra_info"]) == {"index": number}

    def test_policy_0_is_the_staged_model(self, settings, model, tmp_path):
        """It refers to the staged files; code beside a model is never staged."""
        run = prepare(load(settings))
        fetch_policy(run.store, 0, tmp_path / "policy")
        files = {path.name: path.read_bytes() for path in (tmp_path / "policy").iterdir()}
        assert files == {path.name: path.read_bytes() for path in model.iterdir()}
        assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(files)

    def test_again_changes_nothing(self, settings):
        run = prepare(load(settings))
        before = {info.key: run.store.read(info.key) for info in run.store.list("")}
        again = prepare(
            load(settings, "trainer.total_training_steps=7", "launch.rollout_workers=2")
        )
        assert again.body == run.body
        assert {info.key: run.store.read(info.key) for info in run.store.list("")} == before

    def test_two_flows_at_once(self, settings):
        """Both have checked before either creates the run: one wins, the other attaches to it, or
        is refused if it is another run."""
        inputs, same = check(settings), check(settings)
        other = check(settings, "trainer.seed=5")
        first = stage(inputs)
        assert stage(same).body == first.body
        with pytest.raises(InputError, match=r"trainer\.seed: it has 1, now 5"):
            stage(other)

    def test_interrupted_staging_is_completed(self, settings):
        """Killed between two objects: the next start makes what is missing."""
        run = prepare(load(settings))
        run.store.delete(keys.policy(0))
        run.store.delete(keys.run_json())
        run.store.delete(run.body["inputs"]["reward"]["key"])
        assert prepare(load(settings)).body["inputs"] == run.body["inputs"]

    def test_several_files_and_validation(self, settings):
        more = write_parquet(settings.parent / "more.parquet", verl_rows(3))
        config = load(
            settings, f"data.train_files=[{settings.parent}/train.parquet,{more}]",
            f"data.val_files={more}",
        )  # fmt: skip
        run = prepare(config)
        assert (run.prompt_count, run.val_prompt_count) == (13, 3)

    def test_checking_leaves_nothing_behind(self, settings):
        """Not even folders: those that are not there yet are the run's to make."""
        before = sorted(settings.parent.rglob("*"))
        check(
            settings, *R3, f"{REPLAY}.record_file={settings.parent}/sets/one",
            f"trainer.default_local_dir={settings.parent}/logs",
        )  # fmt: skip
        assert sorted(settings.parent.rglob("*")) == before


class TestAttach:
    def test_another_run_of_the_same_name(self, settings):
        """Every differing key with both values, and the ways out."""
        prepare(load(settings))
        problem = the_error(
            settings, "trainer.seed=2", "actor_rollout_ref.actor.optim.lr=0.5",
            f"{REPLAY}.mode=R2", "trainer.total_training_steps=9",
        )  # fmt: skip
        uri = open_store(f"{settings.parent}/store/test").uri
        assert problem == (
            f"trainer.experiment_name: the run 'test' in {uri} exists with other settings; choose "
            "another trainer.experiment_name, or go on with the old values:\n"
            "  actor_rollout_ref.actor.optim.lr: it has 1e-06, now 0.5\n"
            "  actor_rollout_ref.actor.router_replay.mode: it has 'disabled', now 'R2'\n"
            "  trainer.seed: it has 1, now 2"
        )

    def test_paths_may_change_but_not_contents(self, settings, model):
        """Inputs are compared by content."""
        prepare(load(settings))
        elsewhere = settings.parent / "elsewhere"
        elsewhere.mkdir()
        copies = [shutil.copy(settings.parent / name, elsewhere) for name in
                  ("train.parquet", "reward.py")]  # fmt: skip
        shutil.copytree(model, elsewhere / "model")
        moved = (
            f"data.train_files={copies[0]}",
            f"custom_reward_function.path={copies[1]}",
            f"actor_rollout_ref.model.path={elsewhere}/model",
        )
        prepare(load(settings, *moved))

        Path(copies[1]).write_text(Path(copies[1]).read_text() + "# changed\n")
        write_parquet(Path(copies[0]), verl_rows(9))
        weights = elsewhere / "model/model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
        problem = the_error(settings, *moved, f"data.val_files={copies[0]}")
        assert "data.train_files: it has 10 prompts, now 9, with other content" in problem
        assert "data.val_files: it has none, now prompts" in problem
        assert "custom_reward_function.path: it has SHA-256" in problem
        assert "actor_rollout_ref.model.path: model.safetensors: it has SHA-256" in problem

    def test_broken_or_newer_run_json(self, settings):
        store = prepare(load(settings)).store
        for body, message in (
            ({"format": 2}, "has format 2, expected 1"),
            ({"format": 1, "config": {"a": 1}}, "was made by another version"),
            ({"format": 1}, "cannot be read: KeyError('config')"),
        ):
            store.delete(keys.run_json())
            store.create(keys.run_json(), json.dumps(body).encode())
            assert message in the_error(settings)


class TestPrompts:
    @pytest.mark.parametrize("column", ["prompt", "data_source", "reward_model"])
    def test_missing_column_names_those_that_are_there(self, settings, column):
        rows = [{k: v for k, v in row.items() if k != column} for row in verl_rows(10)]
        path = write_parquet(settings.parent / "train.parquet", rows)
        there = ", ".join(rows[0])
        assert the_error(settings).startswith(
            f"data.train_files: {path} has no column {column!r} (found {there}); add it"
        )

    def test_other_column_names(self, settings):
        rows = [{**row, "messages": row["prompt"], "prompt": "x"} for row in verl_rows(10)]
        write_parquet(settings.parent / "train.parquet", rows)
        assert check(settings, "data.prompt_key=messages").prompt_count == 10

    def test_without_extra_info(self, settings):
        rows = [{k: v for k, v in row.items() if k != "extra_info"} for row in verl_rows(10)]
        write_parquet(settings.parent / "train.parquet", rows)
        assert check(settings).prompts.table["extra_info"].to_pylist() == [None] * 10

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"prompt": "1 + 1"}, "row 0: column 'prompt' has '1 + 1', expected a list of {role, "
             "content} texts (2 of 2 rows are wrong)"),
            ({"prompt": []}, "row 0: column 'prompt' has [], expected a list"),
            ({"prompt": [{"role": "user"}]}, "row 0: column 'prompt' has [{'role': 'user'}], "),
            ({"data_source": 1}, "row 0: column 'data_source' has 1, expected text"),
            ({"reward_model": {"style": "rule"}}, "row 0: column 'reward_model' has {'style': "
             "'rule'}, expected a struct with ground_truth"),
            ({"extra_info": {"raw": b"x"}}, "row 0: column 'extra_info' has {'raw': b'x'}, not "
             "JSON"),
        ],
    )  # fmt: skip
    def test_rows_that_are_not_verls(self, settings, change, message):
        rows = [{**row, **change} for row in verl_rows(2)]
        path = write_parquet(settings.parent / "train.parquet", rows)
        assert f"data.train_files: {path}, {message}" in the_error(settings)

    def test_empty_file(self, settings):
        path = settings.parent / "train.parquet"
        pq.write_table(pq.read_table(path).slice(0, 0), path)
        assert the_error(settings) == (
            f"data.train_files: {path} has no rows; write at least one prompt into it"
        )

    def test_missing_and_unreadable_files_are_shown_together(self, settings):
        problems = check_error(
            settings, "data.train_files=absent.parquet", f"data.val_files={settings}"
        )
        assert problems[0].startswith("data.train_files: no file absent.parquet (from ")
        assert problems[1].startswith(f"data.val_files: {settings} cannot be read as Parquet: ")

    def test_prompts_over_the_limit(self, settings):
        """How many, an example, and both ways out; or they are dropped and that is said."""
        rows = verl_rows(10)
        for number in (3, 7):
            rows[number]["prompt"][0]["content"] = "1 + 1 " * number
        path = write_parquet(settings.parent / "train.parquet", rows)
        limit = "data.max_prompt_length=20"
        problem = the_error(settings, limit)
        longest = int(problem.split("has ")[1].split(";")[0])
        assert problem == (
            "data.max_prompt_length: 2 of 10 prompts of data.train_files have more than 20 tokens; "
            f"the longest, row 7 of {path}, has {longest}; write {longest}, or drop them with "
            "data.filter_overlong_prompts=True"
        )
        assert check(settings, f"data.max_prompt_length={longest}").prompt_count == 10
        inputs = check(settings, limit, "data.filter_overlong_prompts=True")
        assert inputs.prompt_count == 8
        assert inputs.prompts.table["prompt_id"].to_pylist() == list(range(8))
        assert inputs.notes == (
            "data.train_files: 2 prompts dropped, longer than data.max_prompt_length; 8 are left "
            "(data.filter_overlong_prompts=True)",
        )
        assert "all 10 prompts have more than data.max_prompt_length=2" in the_error(
            settings, "data.max_prompt_length=2", "data.filter_overlong_prompts=True"
        )

    def test_fewer_prompts_than_a_step_needs(self, settings):
        assert the_error(settings, "data.train_batch_size=12") == (
            "data.train_batch_size: found 12, but data.train_files has 10 prompts; write at most "
            "10, or add prompts"
        )


class TestModel:
    def change(self, settings: Path, model: Path, name: str, content: str | None) -> str:
        """The error after a file of a copy of the model is replaced, or removed."""
        copy = settings.parent / "copy"
        shutil.copytree(model, copy)
        if content is None:
            (copy / name).unlink()
        else:
            (copy / name).write_text(content)
        return the_error(settings, f"actor_rollout_ref.model.path={copy}")

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("config.json", None, "has no config.json; write the folder of a model in HF's"),
            ("config.json", "{", "config.json cannot be read: "),
            ("config.json", "[]", "config.json holds no JSON object"),
            ("tokenizer.json", None, "has no tokenizer.json; write one with transformers"),
            ("tokenizer.json", "{}", "cannot be read: "),
            ("chat_template.jinja", None, "has no chat template; add chat_template.jinja"),
            ("chat_template.jinja", "{{ raise_exception('no') }}", "the model's chat template "
             "refuses it: no"),
            ("model.safetensors", None, "has no model.safetensors (nor an index of several)"),
            ("model.safetensors.index.json", '{"weight_map": {"w": "model-1.safetensors"}}',
             "has no model-1.safetensors (named by model.safetensors.index.json)"),
            ("model.safetensors.index.json", "{}", "has no weight_map"),
        ],
    )  # fmt: skip
    def test_incomplete_folder(self, settings, model, name, content, message):
        assert message in self.change(settings, model, name, content)

    def test_no_folder(self, settings):
        assert the_error(settings, "actor_rollout_ref.model.path=./no/such/folder").startswith(
            "actor_rollout_ref.model.path: no folder ./no/such/folder (from "
        )

    @pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
    def test_other_inputs_are_checked_without_a_model(self, settings, model, name):
        copy = shutil.copytree(model, settings.parent / "copy")
        (copy / name).unlink()
        found = check_error(
            settings, f"actor_rollout_ref.model.path={copy}", "data.train_files=absent.parquet",
            "custom_reward_function.path=absent.py",
        )  # fmt: skip
        assert [problem.split(":")[0] for problem in found] == [
            "actor_rollout_ref.model.path",
            "data.train_files",
            "custom_reward_function.path",
        ]

    def test_hub_that_is_not_reached(self, settings, monkeypatch):
        """Said with its cause; the hub's own offline switch makes the test independent of a net."""
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        problem = the_error(settings, "actor_rollout_ref.model.path=nobody/no-such-model")
        assert problem.startswith(
            "actor_rollout_ref.model.path: nobody/no-such-model is no folder here, and could not "
            "be fetched from the Hugging Face hub: "
        )

    def test_tokenizer_of_another_model(self, settings, model):
        config = json.loads((model / "config.json").read_text())
        problem = self.change(
            settings, model, "config.json", json.dumps({**config, "vocab_size": 100})
        )
        assert "the model's vocab_size is 100: the tokenizer is another model's" in problem

    def test_dense_model(self, settings, tmp_path):
        """Refused with replay on; without, the run has no geometry."""
        dense = make_tiny(tmp_path / "dense", "qwen3")
        path = f"actor_rollout_ref.model.path={dense}"
        assert "has no MoE layers" in the_error(settings, path, *R3)
        run = prepare(load(settings, path))
        assert run.geometry is None
        assert run.body["geometry"] is None


class TestRewardAndStore:
    def test_reward_file_without_the_function(self, settings):
        path = settings.parent / "reward.py"
        path.write_text("def score(text): return 1.0")
        assert the_error(settings) == (
            f"custom_reward_function.path: {path}: found functions score, expected one named "
            "compute_score; rename it, or set custom_reward_function.name"
        )

    def test_unwritable_store(self, settings):
        """A file lies where a folder is needed: nobody, not even root, can write below it."""
        problem = the_error(settings, f"store.uri={settings}/store")
        assert problem.startswith(f"store.uri: found {settings}/store, which cannot be written: ")
        assert problem.endswith("; choose another place")

    def test_unwritable_local_folder(self, settings):
        problem = the_error(settings, f"trainer.default_local_dir={settings}/logs")
        assert problem.startswith(
            f"trainer.default_local_dir: found {settings}/logs, which cannot be written: "
        )

    def test_unknown_kind_of_store(self, settings):
        assert "scheme 'ftp' is not known" in the_error(settings, "store.uri=ftp://host/store")

    def test_credentials_in_a_place_are_refused_and_not_repeated(self, settings):
        for override in ("store.uri=s3://key:hidden@bucket/a", "store.endpoint=http://a:hidden@b"):
            [problem] = check_error(settings, override)
            assert "credentials" in problem
            assert "hidden" not in problem

    def test_endpoint_that_is_no_url(self, settings):
        problem = the_error(settings, "store.endpoint=localhost:9000")
        assert problem.startswith("store.endpoint: found 'localhost:9000', expected https://HOST")

    def test_local_folder_elsewhere(self, settings):
        problem = the_error(settings, "trainer.default_local_dir=s3://bucket/logs")
        assert problem.endswith("expected a folder of this machine")

    def test_all_problems_are_shown_together(self, settings):
        found = check_error(
            settings, f"{REPLAY}.mode=R3", "data.train_files=absent.parquet",
            "custom_reward_function.path=absent.py", f"store.uri={settings}",
            "trainer.n_gpus_per_node=3",
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        )  # fmt: skip
        assert [problem.split(":")[0] for problem in found] == [
            "actor_rollout_ref.rollout.enable_rollout_routing_replay",
            "trainer.n_gpus_per_node",
            "data.train_files",
            "custom_reward_function.path",
            "store.uri",
        ]


def sample_step(run: Run, config, step: int) -> None:
    """Make and seal a step as the rollout workers would, with routes."""
    plan = make_plan(config, run, step)
    data = read_data(run.store, DataFile(**run.body["inputs"]["prompts"]))
    tokens = pq.read_table(io.BytesIO(data))["token_ids"].to_pylist()
    samples = []
    for id in expected_ids(plan):
        group, _, _ = id.rpartition("/")
        name = group.split("/")[1]
        prompt = np.array(tokens[int(name.split(".")[0])], np.uint32)
        rows = len(prompt) + 2
        sets = np.tile(np.arange(4, dtype=np.uint8), (rows, 3, 1))
        samples.append(
            Sample(
                id,
                group,
                name,
                prompt,
                np.arange(3, dtype=np.uint32),
                np.ones(3, bool),
                np.zeros(3, np.float32),
                "stop",
                (VersionSpan(step, 0, 3),),
                sampling_seed(config.trainer.seed, id),
                1.0,
                None,
                {},
                Routes(sets, np.ones(rows, bool)),
            )
        )
    provenance = Provenance("R3", step, "test")
    commit(run.store, keys.plan(step), {**plan, "shards": 1}, new_attempt())
    write_shard(run.store, step, 0, new_attempt(), samples, run.geometry, provenance)
    seal(run.store, step, 1, lambda _: expected_ids(plan), step)


class TestRecordSets:
    @pytest.fixture
    def recorded(self, settings) -> str:
        """The URI of a run with two sealed steps."""
        config = load(settings, *R3, "trainer.experiment_name=recorded")
        run = prepare(config)
        for step in range(2):
            sample_step(run, config, step)
        return run.uri

    def test_replay(self, settings, recorded):
        """The same settings plan the same samples, so the set fits; no reward file is needed."""
        text = settings.read_text().replace("custom_reward_function", "reward") + "\n"
        settings.write_text(
            "\n".join(line for line in text.splitlines() if not line.startswith("reward"))
        )
        run = prepare(load(settings, *R3, f"{REPLAY}.replay_file={recorded}"))
        assert run.body["inputs"]["reward"] is None

    def test_too_few_steps(self, settings, recorded):
        problem = the_error(
            settings, *R3, f"{REPLAY}.replay_file={recorded}", "trainer.total_training_steps=3"
        )
        assert problem.startswith(
            f"{REPLAY}.replay_file: {recorded} has not all of step 2, but "
            "trainer.total_training_steps is 3: "
        )
        assert problem.endswith("; write 2 steps, or the place of a whole set")

    def test_no_set(self, settings, tmp_path):
        problem = the_error(settings, *R3, f"{REPLAY}.replay_file={tmp_path}/nothing")
        assert problem.startswith(f"{REPLAY}.replay_file: {tmp_path}/nothing has not all of step 0")

    def test_token_digests_that_do_not_match(self, settings, recorded):
        """The same prompt ids with other texts: every shape fits, the digests do not."""
        rows = verl_rows(10)
        for row in rows:
            row["prompt"][0]["content"] = row["prompt"][0]["content"].replace("+", "-")
        write_parquet(settings.parent / "train.parquet", rows)
        problem = the_error(settings, *R3, f"{REPLAY}.replay_file={recorded}")
        assert problem.startswith(f"{REPLAY}.replay_file: replay_file {recorded}, step 0: sample ")
        assert "token digest" in problem
        assert "use the data.train_files" in problem

    def test_other_samples(self, settings, recorded):
        """Another seed plans other prompts."""
        problem = the_error(settings, *R3, f"{REPLAY}.replay_file={recorded}", "data.seed=2")
        assert f"{REPLAY}.replay_file: replay_file {recorded}, step 0" in problem

    def test_other_sampling(self, settings, recorded):
        """Log-probs of another temperature are not comparable with the trainer's."""
        problem = the_error(
            settings,
            *R3,
            f"{REPLAY}.replay_file={recorded}",
            "actor_rollout_ref.rollout.temperature=0.5",
        )
        assert "step 0: sampled with temperature 1.0, this run has 0.5" in problem
        assert "set actor_rollout_ref.rollout.temperature=1.0" in problem

    def test_unknown_sampling(self, settings, recorded):
        """A set that does not say how it was sampled is accepted, and that is told."""
        open_store(recorded).delete(keys.plan(1))
        (note,) = check(settings, *R3, f"{REPLAY}.replay_file={recorded}").notes
        assert "does not say how 1 of 2 steps were sampled" in note

    def test_plan_without_sampling(self, settings, recorded):
        store = open_store(recorded)
        store.delete(keys.plan(0))
        store.create(keys.plan(0), b"{}")
        problem = the_error(settings, *R3, f"{REPLAY}.replay_file={recorded}")
        assert f"{keys.plan(0)} in {recorded}: it has no sampling.temperature" in problem

    @pytest.mark.parametrize("content", [None, b"cut off"])
    def test_a_file_is_not_whole(self, settings, recorded, content):
        """A set copied without its routes is told before anything starts."""
        store = open_store(recorded)
        key = next(info.key for info in store.list("steps/000001") if "routes" in info.key)
        store.delete(key)
        if content is not None:
            store.create(key, content)
        problem = the_error(settings, *R3, f"{REPLAY}.replay_file={recorded}")
        assert key in problem
        assert ("no such object" if content is None else "7 bytes, its commit says") in problem

    def test_routes_of_the_other_kind(self, settings, recorded):
        problem = the_error(settings, f"{REPLAY}.mode=R2", f"{REPLAY}.replay_file={recorded}")
        assert f"{REPLAY}.replay_file: " in problem

    def test_a_new_run_does_not_write_into_an_old_set(self, settings, recorded):
        """A set is one run's; going on with the run that writes it is no conflict."""
        record = (*R3, f"{REPLAY}.record_file={recorded}")
        assert the_error(settings, *record).startswith(
            f"{REPLAY}.record_file: {recorded} holds a set already (steps/000000/manifest"
        )
        fresh = (*R3, f"{REPLAY}.record_file={settings.parent}/set")
        config = load(settings, *fresh)
        run = prepare(config)
        open_store(f"{settings.parent}/set").create(keys.manifest(0), b"{}")
        assert check_inputs(config).store.uri == run.uri

    def test_unwritable_set(self, settings):
        assert f"{REPLAY}.record_file: found {settings}/set, which cannot be written" in the_error(
            settings, *R3, f"{REPLAY}.record_file={settings}/set"
        )
