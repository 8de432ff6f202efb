"""An imported verl job is a valid settings file, except for the settings on its TODO lines."""

import re
from pathlib import Path

import pytest
import yaml

from pipeline import extras
from pipeline.config.imports.defaults import VERL_DEFAULTS
from pipeline.config.imports.job import import_verl
from pipeline.config.keys import setting_keys, value_at
from pipeline.config.reading.load import load_config
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from tests.verl_jobs import (
    FILES,
    OTHER_DEFAULTS,
    jobs,
    needs_verl,
    newest_defaults,
    write_script,
)

TODO = re.compile(r"^( *)# TODO ([\w.-]+): ", re.MULTILINE)


def todos(text: str) -> set[str]:
    """Return the last part of each key on a TODO line."""
    return {found[2].rpartition(".")[2] for found in TODO.finditer(text)}


def check_import(folder: Path, text: str) -> None:
    """Check that the reader finds problems only with settings on TODO lines."""
    path = folder / "my.yaml"
    path.write_text(text)
    problems, notes = read(path)
    decide = [problem for problem in problems if " is undecided; " in problem]
    assert len(decide) == len(re.findall(r"(?m)^ *# TODO (?!.*: \.\.\.$)", text))
    problems = tuple(problem for problem in problems if problem not in decide)
    assert [problem for problem in problems if ": missing, " not in problem] == []
    assert {problem.partition(":")[0].rpartition(".")[2] for problem in problems} <= todos(text)
    assert [note for note in notes if "ignored" in note] == []  # the file has no ignored settings


def read(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the reader's problems and notes."""
    try:
        return (), load_config(path).notes
    except InputError as error:
        return error.problems, error.notes


@pytest.mark.parametrize("name", jobs())
def test_scripts_round_trip(tmp_path, name):
    text = import_verl(write_script(tmp_path, name), [], {})
    check_import(tmp_path, text)
    for setting in [one for one in jobs()[name] if not one.startswith("--")]:
        key = setting.partition("=")[0].lstrip("+")
        assert re.search(rf"\b{re.escape(key.rpartition('.')[2])}\b", text), key


@needs_verl
@pytest.mark.parametrize("file", FILES or ["none"], ids=str)
def test_generated_files_round_trip(tmp_path, file):
    text = import_verl(file, ["trainer.nnodes=2"], {})
    check_import(tmp_path, text)
    content = yaml.safe_load(text)
    assert content["trainer"]["nnodes"] == 2
    assert content["data"]["train_batch_size"] == 1024


def test_the_file_lists_settings_in_our_order(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo trainer.nnodes=2 data.train_batch_size=64 "
        "actor_rollout_ref.rollout.name=sglang actor_rollout_ref.actor.clip_ratio=0.3 "
        "+ray_kwargs.ray_init.num_cpus=4 nonsense.x=1 trainer.total_training_steps=7 "
        "algorithm.adv_estimator=grpo trainer.experiment_name=$(date)\n"
    )
    text = import_verl(script, ["data.train_batch_size=32"], {})
    assert [line for line in text.splitlines() if re.match("[a-z]", line)] == [
        "data:",
        "actor_rollout_ref:",
        "algorithm:",
        "trainer:",
    ]
    assert "\n  train_batch_size: 32\n" in text
    assert "\n    n: 1 # verl's default; the default here is 8\n" in text
    assert "\n    # TODO actor_rollout_ref.rollout.name: sglang\n    #   " in text
    left_out = " ".join(text.partition("# Left out")[2].split())
    assert "ray_kwargs.ray_init.num_cpus=4, nonsense.x=1: not taken over" in left_out or (
        "nonsense.x=1, ray_kwargs.ray_init.num_cpus=4: not taken over" in left_out
    )
    assert "line 1 of the script takes this value from `date`" in " ".join(text.split())
    assert "total_epochs" not in text
    flat = " ".join(text.replace("#", "").split())
    assert (
        "verl's default; -1 means every 10 steps here, because a restart needs checkpoints; only "
        "the newest checkpoints are kept" in flat
    )


def test_undecided_settings_are_refused_until_they_are_decided(tmp_path):
    """If the file were accepted, the run would use our default for such a setting, or the setting
    would not have the effect that it has in verl."""
    script, mine = tmp_path / "run.sh", tmp_path / "my.yaml"
    script.write_text(
        "python3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=$(nproc) "
        "algorithm.use_pf_ppo=True actor_rollout_ref.model.path=m "
        "data.train_files=t.parquet trainer.experiment_name=x trainer.total_training_steps=2 "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2\n"
    )
    text = import_verl(script, ["algorithm.adv_estimator=grpo"], {})
    mine.write_text(text)
    problems, _ = read(mine)
    keys = [re.fullmatch(r".*, line \d+: ([\w.]+) is undecided; .*", p) for p in problems]
    assert {key and key[1] for key in keys} == {
        "trainer.n_gpus_per_node",
        "algorithm.use_pf_ppo",
    }
    without = [line for line in text.splitlines() if "use_pf_ppo" not in line]
    mine.write_text("\n".join(without))
    assert load_config(mine, ["trainer.n_gpus_per_node=2"]).config.trainer.n_gpus_per_node == 2


def imported(folder: Path, text: str, **variables: str) -> str:
    script = folder / "run.sh"
    script.write_text(text)
    return import_verl(script, [], variables)


def open_points(text: str) -> dict[str, str]:
    """Return the value of each TODO line, by key."""
    return dict(re.findall(r"(?m)^ *# TODO ([\w.-]+): (.*)$", text))


def test_exported_variables_are_open_points(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ray.yaml").write_text("env_vars: {TORCH_NCCL_AVOID_RECORD_STREAMS: '1'}\n")
    text = imported(
        tmp_path,
        """export VLLM_USE_V1=1 HYDRA_FULL_ERROR=1 MODEL=/m
declare -x SANDBOX_URL=http://sandbox JUDGE_API_KEY=hidden
NVTE_FUSED_ATTN=0 ray job submit --runtime-env ray.yaml -- env RAY_DEDUP_LOGS=0 \
  python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=$MODEL data.train_files=t \
  trainer.experiment_name=x actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
  +ray_kwargs.ray_init.runtime_env.env_vars.NCCL_DEBUG=WARN
""",
        GIVEN="1",
    )
    assert open_points(text) == {
        "VLLM_USE_V1": "'1'",
        "SANDBOX_URL": "http://sandbox",
        "JUDGE_API_KEY": "'***'",
        "NVTE_FUSED_ATTN": "'0'",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "'1'",
        "NCCL_DEBUG": "WARN",
    }
    reasons = {
        key: reason
        for keys, reason in re.findall(r"((?:# TODO .*\n)+)#   (.*)", text)
        for key in re.findall("TODO (\\w+)", keys)
    }
    assert "engine" in reasons["VLLM_USE_V1"]
    assert "trainer" not in reasons["VLLM_USE_V1"]
    assert "trainer" in reasons["NVTE_FUSED_ATTN"]
    assert "engine" not in reasons["NVTE_FUSED_ATTN"]
    assert "engine and trainer" in reasons["NCCL_DEBUG"]
    assert "reward" in reasons["SANDBOX_URL"]
    ignored = text.partition("# Left out")[2]
    assert all(name in ignored for name in ("HYDRA_FULL_ERROR", "RAY_DEDUP_LOGS", "MODEL=/m"))
    assert "GIVEN" not in text
    mine = tmp_path / "my.yaml"
    mine.write_text(text)
    assert len(read(mine)[0]) == 6
    mine.write_text("\n".join(line for line in text.splitlines() if "# TODO" not in line))
    assert read(mine)[0] == ()


@pytest.mark.parametrize(
    ("key", "written", "shown"),
    [
        ("actor_rollout_ref.model.path", "", ""),
        ("actor_rollout_ref.model.path", "$MODEL", "$MODEL"),
        ("data.train_files", "", ""),
        ("data.train_files", "[]", []),
        ("data.train_files", "\"['']\"", [""]),
        ("data.train_files", "$DATA/train.parquet", "$DATA/train.parquet"),
        ("data.train_files", None, None),
        ("data.val_files", "\"['a','$DATA/b']\"", "['a','$DATA/b']"),
        ("trainer.experiment_name", "$NAME", "$NAME"),
        ("trainer.nnodes", "$NODES", "$NODES"),
        ("custom_reward_function.path", "/r/$REWARD", "/r/$REWARD"),
    ],
)
def test_values_that_are_empty_or_not_set_are_open_points(tmp_path, key, written, shown):
    settings = {
        "actor_rollout_ref.model.path": "/m",
        "data.train_files": "/t.parquet",
        "trainer.experiment_name": "x",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "1",
        key: written,
    }
    words = " ".join(f"{k}={v}" for k, v in settings.items() if v is not None)
    text = imported(tmp_path, f"python3 -m verl.trainer.main_ppo {words}\n")
    found = open_points(text)
    assert found.keys() == {key}
    assert found[key] == "..." if written is None else yaml.safe_load(found[key]) == shown
    assert "TODO): 1." in " ".join(text.split("\n\n")[0].replace("\n#", "").split())


def test_relative_paths_are_those_of_the_trainers_folder(tmp_path, monkeypatch):
    start, jobs = tmp_path / "start", tmp_path / "repo/jobs"
    for folder in (start, jobs, tmp_path / "repo/models/mine"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(start)
    (tmp_path / "repo/mine.yaml").write_text("data: {train_files: [t.parquet, s3://b/t.parquet]}\n")
    command = (
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path={model} "
        "custom_reward_function.path=r.py data.val_files=~/v.parquet"
    )
    text = f"cd $(dirname $0)/..\n{command.format(model='models/mine')} --config-path=. "
    content = yaml.safe_load(imported(jobs, text + "--config-name=mine\n"))
    repo = str(tmp_path / "repo")
    assert content["data"] == {
        "train_files": [f"{repo}/t.parquet", "s3://b/t.parquet"],
        "val_files": "~/v.parquet",
    }
    assert content["custom_reward_function"]["path"] == f"{repo}/r.py"
    assert content["actor_rollout_ref"]["model"]["path"] == f"{repo}/models/mine"
    text = f"cd $(dirname $0)/..\n{command.format(model='Qwen/Qwen3-30B-A3B')}\n"
    content = yaml.safe_load(imported(jobs, text))
    assert content["actor_rollout_ref"]["model"]["path"] == "Qwen/Qwen3-30B-A3B"
    content = yaml.safe_load(imported(jobs, command.format(model="models/mine")))
    assert content["custom_reward_function"]["path"] == "r.py"


def test_the_penalty_on_long_responses_is_kept(tmp_path):
    """In verl, the penalty's group also contains settings that Retrace does not have."""
    script = tmp_path / "run.sh"
    buffer = "+reward_model.reward_kwargs.overlong_buffer_cfg"
    script.write_text(
        f"python3 -m verl.trainer.main_ppo reward_model.reward_manager=dapo {buffer}.enable=True "
        f"{buffer}.len=4 {buffer}.penalty_factor=0.5\n"
    )
    content = yaml.safe_load(import_verl(script, [], {}))
    assert content["reward"]["reward_kwargs"]["overlong_buffer_cfg"] == {
        "enable": True,
        "len": 4,
        "penalty_factor": 0.5,
    }


def test_defaults_and_interpolation_are_composed(tmp_path):
    (tmp_path / "base.yaml").write_text("data: {max_prompt_length: 7, train_batch_size: 4}\n")
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "defaults: [base, _self_]\n"
        "data: {train_batch_size: 16, max_response_length: '${data.max_prompt_length}'}\n"
        "actor_rollout_ref: {model: {path: '???'}}\n"
    )
    for source, arguments in ((mine, []), (tmp_path, ["--config-name=mine"])):
        text = import_verl(source, [*arguments, "data.train_batch_size=32"], {})
        assert yaml.safe_load(text)["data"] == {
            "train_batch_size": 32,
            "max_prompt_length": 7,
            "max_response_length": 7,
        }
        assert "# TODO actor_rollout_ref.model.path: ..." in text


def test_a_scripts_own_settings_file_is_read(tmp_path):
    (tmp_path / "mine.yaml").write_text("data: {train_batch_size: 16}\n")
    script = tmp_path / "run.sh"
    script.write_text(
        f"python3 -m verl.trainer.main_ppo --config-path={tmp_path} --config-name mine\n"
    )
    assert yaml.safe_load(import_verl(script, [], {})) == {"data": {"train_batch_size": 16}}


def test_interpolation_in_a_script_is_resolved(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo data.max_prompt_length=7 "
        "data.max_response_length='${data.max_prompt_length}'\n"
    )
    assert yaml.safe_load(import_verl(script, [], {}))["data"]["max_response_length"] == 7


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ("a: ${nowhere}\n", [], "Interpolation key 'nowhere' not found"),
        ("defaults: [ppo_trainer]\n", [], "install verl or add verl's folder to the settings "),
        (
            "data: {n: 1}\n",
            ["--trainer.nnodes=2"],
            "--trainer.nnodes=2: this option of verl's command",
        ),
        ("data: {n: 1}\n", ["data"], "data: expected key.path=value"),
    ],
)
def test_errors_name_the_value_that_cannot_be_resolved(tmp_path, content, arguments, message):
    (tmp_path / "mine.yaml").write_text(content)
    with pytest.raises(InputError, match=re.escape(message)):
        import_verl(tmp_path / "mine.yaml", arguments, {})


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("my.txt", (), "expected verl's shell script (.sh) or YAML file (.yaml)"),
        ("no.sh", (), "no such file (from {folder}); expected verl's shell script"),
        ("no.yaml", (), "no such file (from {folder}); expected verl's shell script"),
        ("no", ("--config-name=mine",), "no such file or folder (from {folder}); expected verl's"),
        ("jobs", (), "found a folder, expected verl's shell script"),
        ("my.yaml", ("--config-name=mine",), "found a file and --config-name, expected a folder"),
        ("binary.sh", (), "the script cannot be read: the file is not text"),
    ],
)
def test_sources_that_are_not_verl_jobs_are_refused(
    tmp_path, monkeypatch, name, arguments, message
):
    monkeypatch.chdir(tmp_path)
    Path("jobs").mkdir()
    Path("my.txt").write_text("trainer: {}\n")
    Path("my.yaml").write_text("trainer: {}\n")
    Path("binary.sh").write_bytes(b"\xff")
    with pytest.raises(InputError) as caught:
        import_verl(Path(name), arguments, {})
    (problem,) = caught.value.problems
    assert problem.startswith(f"{name}: {message.format(folder=tmp_path)}")


def test_the_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    (tmp_path / "mine.yaml").write_text("defaults: [base]\n")
    with pytest.raises(InputError, match=re.escape("pip install 'retrace-moe[verl]'")):
        import_verl(tmp_path / "mine.yaml", [], {})


@needs_verl
def test_verls_defaults_are_known():
    """An import writes each of verl's defaults that differs from ours, unless a table gives the
    reason for omitting it."""
    verl = newest_defaults()
    ours = RunConfig.model_validate(
        {"actor_rollout_ref": {"model": {"path": "x"}}, "trainer": {"experiment_name": "x"}}
        | {"custom_reward_function": {"path": "x"}}
    )
    assert {key: verl[key] for key in VERL_DEFAULTS} == VERL_DEFAULTS
    differing = {
        key.name
        for key in setting_keys()
        if key.name in verl and verl[key.name] not in ("???", value_at(ours, key.name))
    }
    others = differing - VERL_DEFAULTS.keys() - {"custom_reward_function.path"}
    assert others == OTHER_DEFAULTS.keys() & differing
    assert VERL_DEFAULTS.keys() <= differing


def test_restricted_sampling_must_be_decided(tmp_path):
    rollout = "actor_rollout_ref.rollout"
    job = f"python3 -m verl.trainer.main_ppo {rollout}.top_p=0.9 {rollout}.top_k=20"
    script = tmp_path / "job.sh"
    script.write_text(job)
    text = import_verl(script, [], {})
    assert {"top_p", "top_k"} <= todos(text)
    check_import(tmp_path, text)
