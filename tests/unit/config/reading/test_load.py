"""Loading turns a YAML file and overrides in verl's style into one typed tree, or reports all
problems together, each with its key, the value found, the values expected and the fix."""

import pytest

from pipeline.config.keys import value_at
from pipeline.config.reading.load import load_config
from pipeline.config.reading.read import read_file, read_override
from pipeline.errors import InputError
from tests.unit.config.settings import (
    ACTOR,
    MEGATRON,
    MINIMAL,
    OVERRIDE,
    RECORD,
    REPLAY,
    ROLLOUT,
    load,
    load_error,
)

CORRECTION = "algorithm.rollout_correction"
MODEL = "actor_rollout_ref.model.path"


def test_a_file_is_read_and_defaults_are_added(tmp_path):
    config = load(tmp_path).config
    assert config.data.train_files == "train.parquet"
    assert config.actor_rollout_ref.actor.router_replay.mode == "disabled"


@pytest.mark.parametrize("value", ["R2", '"R2"', "'R2'"])
@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_overrides_may_have_literal_quotes_and_hydras_prefix(tmp_path, value, prefix):
    """verl's documentation shows mode="R2", and users' scripts keep the quotes; `+` is Hydra's
    prefix."""
    config = load(tmp_path, f"{prefix}{REPLAY}.mode={value}").config
    assert config.actor_rollout_ref.actor.router_replay.mode == "R2"


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1_000", 1000),
        ("-1_000_000.5", -1e6 - 0.5),
        ("1_000e3", 1e6),
        *((text, text) for text in ("0.5_2", "0.5_200", "1_2", "1_2e3", "1_0000", "1_000_0")),
    ],
)
def test_an_underscore_in_a_number_separates_only_thousands(tmp_path, written, value):
    """Any other value with an underscore is text, which some settings read as two bounds."""
    path = tmp_path / "config.yaml"
    path.write_text(f"found: {written}\n")
    assert read_file(path) == {"found": value}
    assert read_override(f"found={written}") == (["found"], value)


@pytest.mark.parametrize(
    ("written", "value"), [("1e-6", 1e-6), ("1", 1.0), ("2.5E-3", 2.5e-3), ("1.0e6", 1e6)]
)
def test_numbers_are_read_as_omegaconf_reads_them(tmp_path, written, value):
    """YAML 1.1 reads 1e-6 as text, but verl's users write such numbers, both in overrides and in
    files."""
    text = MINIMAL.replace("model}}", f"model}}, actor: {{optim: {{lr: {written}}}}}}}")
    for loaded in (load(tmp_path, f"{ACTOR}.optim.lr={written}"), load(tmp_path, text=text)):
        assert loaded.config.actor_rollout_ref.actor.optim.lr == value


TEXTS = ("0123", "83", "12:30", "no", "Yes", "1e3", "0x10", "1_000", "2026-11-28", "true")


@pytest.mark.parametrize("text", TEXTS)
def test_text_stays_text_where_the_setting_is_text(tmp_path, text):
    file = MINIMAL.replace("path: model", f"path: {text}").replace(
        "train_files: train.parquet", f"train_files: [{text}, '{text}']"
    )
    for loaded in (
        load(tmp_path, text=file),
        load(tmp_path, f"data.train_files=[{text},'{text}']", f"{MODEL}={text}"),
        load(tmp_path, f"data={{train_files: [{text}, '{text}']}}", f'{MODEL}="{text}"'),
    ):
        assert loaded.config.data.train_files == [text, text]
        assert loaded.config.actor_rollout_ref.model.path == text
    assert load(tmp_path, f"trainer.experiment_name={text}").config.trainer.experiment_name == text
    assert load(tmp_path, f"store.uri={text}").config.run_uri.startswith(f"{text}/")
    (problem,) = load_error(tmp_path, f"trainer.logger=[console,{text}]")
    assert f"item 1: found {text!r} (text)" in problem


@pytest.mark.parametrize("text", ["010", "-010", "12:30", "1:20:30", "0o10"])
def test_numbers_that_yaml_versions_read_differently_are_text(tmp_path, text):
    """YAML 1.1 reads octal and sexagesimal numbers, which YAML 1.2 and Hydra do not."""
    (problem,) = load_error(tmp_path, f"trainer.nnodes={text}")
    assert f"found {text!r} (text)" in problem


@pytest.mark.parametrize(
    "key", ["data.train_files", "data.val_files", MODEL, "custom_reward_function.path", "store.uri",
            "store.ca_bundle", "trainer.default_local_dir", f"{REPLAY}.record_file",
            f"{REPLAY}.replay_file"],
)  # fmt: skip
def test_paths_are_expanded_and_never_empty(tmp_path, monkeypatch, key):
    monkeypatch.setenv("HOME", "/home/me")
    for written in ("~/a", "$HOME/a"):
        assert value_at(load(tmp_path, f"{key}={written}").config, key) == "/home/me/a"
    for wrong in ("", "$NO_SUCH_VARIABLE/a", "~no-such-user/a"):
        (problem,) = load_error(tmp_path, f"{key}={wrong}")
        assert problem.startswith(f"{key}: found ")


def test_each_file_of_a_list_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = load(tmp_path, "data.train_files=[~/a, s3://bucket/b]").config
    assert config.data.train_files == ["/home/me/a", "s3://bucket/b"]


@pytest.mark.parametrize("group", ["rollout_correction", "filter_groups"])
def test_null_resets_a_group_that_verl_may_omit(tmp_path, group):
    """The null removes the group's settings, whether from the file or from an earlier override."""
    written = {"rollout_correction": "rollout_is=token", "filter_groups": "enable=True"}[group]
    taken_back = (f"algorithm.{group}.{written}", f"algorithm.{group}=null")
    assert load(tmp_path, *taken_back).config == load(tmp_path).config


def test_overrides_are_parsed_as_yaml_and_merged(tmp_path):
    config = load(
        tmp_path,
        "trainer.logger=[console,tensorboard]",
        "data.train_files=['a.parquet','b.parquet']",
        f"{RECORD}=True",
        "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32",
        f"{OVERRIDE}={{recompute_granularity: full}}",
        "data.val_files=null",
        "trainer.nnodes=2",
        "trainer.nnodes=3",
    ).config
    assert config.trainer.logger == ["console", "tensorboard"]
    assert config.data.train_files == ["a.parquet", "b.parquet"]
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay is True
    # As in OmegaConf, a mapping is merged into an existing one.
    assert config.actor_rollout_ref.actor.megatron.override_transformer_config == {
        "moe_router_dtype": "fp32",
        "recompute_granularity": "full",
    }
    assert config.data.val_files is None
    assert config.trainer.nnodes == 3  # the last override applies


def test_the_message_for_an_unknown_key_names_the_nearest(tmp_path):
    found = load_error(
        tmp_path,
        "trainer.total_training_step=3",
        "trainer.train_batch_size=4",
        f"{ACTOR}.optim.learning_rate=1e-5",
        f"{REPLAY}.mod=R3",
    )
    rate, mode, steps, batch = found
    assert rate.startswith(f"{ACTOR}.optim.learning_rate: unknown key; {ACTOR}.optim contains lr, ")
    assert mode == f"{REPLAY}.mod: unknown key; did you mean {REPLAY}.mode?"
    assert steps.endswith("did you mean trainer.total_training_steps?")
    assert batch.endswith("did you mean data.train_batch_size?")


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("rollout.n", "actor_rollout_ref.rollout"),
        ("trainer.lr", f"{ACTOR}.optim.lr"),
        ("actor_rollout_ref.megatron.dtype", f"{ACTOR}.megatron"),
        ("trainer.lr_warmup_step", f"{ACTOR}.optim.lr_warmup_steps"),
        ("critic.lr", "critic.optim.lr"),
        ("kubernetes.rollout.cpu", "launch.kubernetes"),
        (f"{REPLAY}.enable", None),
        (f"{ACTOR}.loss_mode", f"{ACTOR}.policy_loss.loss_mode"),
        (f"{ACTOR}.kl_coef", f"{ACTOR}.kl_loss_coef"),
        ("trainer.name", "trainer.experiment_name"),
        ("data.batch_size", "data.train_batch_size"),
    ],
)
def test_the_nearest_key_is_not_merely_the_most_similar_text(tmp_path, unknown, nearest):
    """Names in the same group come first, then names in the groups of the actor and the rollout,
    because the critic, the reference and the pods have settings with the same names."""
    (problem,) = load_error(tmp_path, f"{unknown}=1")
    assert problem.endswith(f"did you mean {nearest}?" if nearest else "allow_aux_loss")


@pytest.mark.parametrize(
    ("override", "expected", "fix"),
    [
        ("trainer.nnodes=two", "found 'two' (text), expected an integer >= 1", "the default is 1"),
        (f"{ROLLOUT}.n=1.5", "found 1.5 (a number), expected an integer >= 1", "the default is 8"),
        (f"{REPLAY}.mode=r3", "expected one of disabled, R2, R3", "did you mean R3?"),
        (f"{RECORD}=1", "found 1 (an integer), expected true or false", "the default is False"),
        (f"{MEGATRON}.virtual_pipeline_model_parallel_size=None",
         "found 'None' (text), expected an integer >= 2 or null", "write null"),
        (("data.train_files", 3), "expected a path or a list of paths or null",
         "write a text: '3'"),
        (f"{CORRECTION}.rollout_rs=[token_k1,seq_sum_k1]", "(a list), expected text or null",
         f"write one text: {CORRECTION}.rollout_rs='token_k1,seq_sum_k1'"),
        (("data.train_files", [1, "a.parquet"]), "found [1, 'a.parquet'] (a list), expected a path "
         "or a list of paths or null", "correct it or leave it out"),
        (f"{CORRECTION}.rollout_is_threshold=[0.5,5.0]", "expected a number or text or null",
         "write one number, or both bounds as text, such as 0.5_5.0"),
        ("trainer.logger=[console,wanb]", "item 1: found 'wanb' (text), expected one of console, ",
         "did you mean wandb?"),
        (f"{ACTOR}.optim.betas=[0.9,1.0]", "item 1: found 1.0 (a number), expected a number >= 0 "
         "and < 1", "the default is [0.9, 0.999]"),
        (f"{ACTOR}.optim.lr_warmup_steps=-2", "expected an integer >= 0", "0 for no warm-up"),
        (f"{ACTOR}.policy_loss=gspo", "expected a group of settings",
         f"write {ACTOR}.policy_loss.loss_mode=gspo"),
        ("algorithm.filter_groups=true", "found True (true/false), expected a group of settings",
         "write algorithm.filter_groups.enable=True"),
        (f"{MEGATRON}.dtype=float16", "expected one of bfloat16, float32; float16 requires loss "
         "scaling, which is not supported", "write bfloat16"),
        (f"{ACTOR}.optim.lr=1e400", "found inf (a number), expected a number > 0, not infinity or "
         "NaN", "the default is 1e-06"),
        (f"{ACTOR}.strategy=fsdp", "expected megatron; FSDP is not supported: routing is replayed "
         "in Megatron-core", "write megatron, or leave the key out"),
        (f"{ROLLOUT}.name=sglang", "expected vllm; only vLLM is supported so far", "write vllm, or "
         "leave the key out"),
        ("actor_rollout_ref.model=3", "found 3 (an integer), expected a group of settings",
         f"write its settings below it, such as {MODEL}=..."),
        ("trainer.nnodes", "expected key.path=value, without spaces around =", None),
        ("--trainer.nnodes=2", "expected key.path=value", "leave out the --"),
        ("~trainer.nnodes", "expected key.path=value", "to remove a setting, leave it out"),
        ("trainer..nnodes=1", "the key 'trainer..nnodes' has an empty part", None),
        ("data.train_files=*x", "found *x, which is not a YAML value",
         "quote it: data.train_files='\"...\"'"),
        ("data.train_files=[a.parquet,", "found '[a.parquet,', which ends too early",
         "quote the whole setting in single quotes: 'data.train_files=[a, b]'"),
        (f"{OVERRIDE}={{a:", "which ends too early", f"quotes: '{OVERRIDE}={{a: 1, b: 2}}'"),
        ("trainer.experiment_name=", "found '' (text), expected text of 1 to 200 characters",
         "write a name, such as my-run"),
        ("trainer.experiment_name=null", "found null, expected text", "such as my-run"),
        (("trainer.experiment_name", 3), "found 3 (an integer), expected text", "a text: '3'"),
        (f"{MODEL}=null", "found null, expected a path", "correct it"),
        (f"{OVERRIDE}={{a:1}}", "found {a:1}", "write a space after each colon: {a: 1, b: 2}"),
        ("trainer.experiment_name.x=1", "trainer.experiment_name is 'test', not a group",
         "remove one of the two settings"),
        ("trainer.default_local_dir=out/${trainer.experiment_name}", "interpolation is not "
         "supported", "or resolve the file with `retrace import-verl`"),
    ],
)  # fmt: skip
def test_the_message_for_an_invalid_value_names_the_fix(tmp_path, override, expected, fix):
    (problem,) = load_error(tmp_path, override)
    key = override[0] if isinstance(override, tuple) else override.partition("=")[0]
    assert problem.startswith((f"{key}: ", f"{override}: "))
    assert expected in problem
    assert fix is None or problem.endswith(fix)


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("algorithm.rollout_correction.rollout_is=tokn", "did you mean token?"),
        ("algorithm.rollout_correction.rollout_is=None", "write null"),
        (f"{ACTOR}.strategy=megatorn", "did you mean megatron?"),
        ("actor_rollout_ref.rollout.name=trtllm", "only vLLM is supported so far; write vllm, or "
         "leave the key out"),
        ("trainer.device=npu", "only NVIDIA GPUs and CPUs are supported; write auto"),
        ("actor_rollout_ref.rollout.dtype=bf16", "did you mean bfloat16?"),
        ("actor_rollout_ref.rollout.dtype=half", "float16 requires loss scaling, which is not "
         "supported; write bfloat16"),
        ("algorithm.adv_estimator=gdpo", "gdpo is not supported here; write one of these names, or "
         "your own function (file.py:function)"),
        (f"{ACTOR}.policy_loss.loss_mode=dro", "dro is not supported here; write one of these "
         "names, or your own function (file.py:function)"),
        (f"{ACTOR}.policy_loss.loss_mode=bypass_mode", "this loss has its own setting; write "
         "algorithm.rollout_correction.bypass_mode=True instead"),
        (f"{ACTOR}.kl_loss_type=k3+", "+ (straight-through gradient) is not supported; write mse, "
         "whose gradient is that of k3+"),
        ("algorithm.kl_penalty=kl+", "+ (straight-through gradient) is not supported, and would "
         "have no effect on a reward; write kl"),
        ("algorithm.kl_penalty=full", "verl does not implement full; write one of these names"),
        ("launch.kubernetes.rollout.memory=64", "write a quantity such as 64Gi"),
    ],
)  # fmt: skip
def test_an_unsupported_value_of_verl_is_not_treated_as_a_misspelling(tmp_path, override, fix):
    """A value similar to an option is a misspelling, unless the value has a meaning in verl."""
    (problem,) = load_error(tmp_path, override)
    assert problem.endswith(f"; {fix}")


def test_all_problems_are_reported_together(tmp_path):
    found = load_error(tmp_path, "x", "critic.enable=True", "trainer.nnodes=0", "tariner.nnodes=1")
    assert [problem.split(":")[0] for problem in found] == [
        "x",
        "trainer.nnodes",
        "tariner",
        "critic.enable",
    ]


def test_missing_settings_are_named(tmp_path):
    path, name = load_error(tmp_path, text="")
    assert path == (
        f"{MODEL}: missing, expected a path; add `actor_rollout_ref: {{model: {{path: ...}}}}` to "
        f"the file, or {MODEL}=... to the command"
    )
    assert name.startswith("trainer.experiment_name: missing, expected text of 1 to 200 ")


def test_a_duplicate_yaml_key_is_refused(tmp_path):
    """Without this check, YAML would silently use the last value."""
    (problem,) = load_error(tmp_path, text="trainer:\n  seed: 1\n  nnodes: 1\n  seed: 2\n")
    assert problem == (
        f"{tmp_path}/config.yaml, line 4: key 'seed' appears twice, on line 2 and on line 4; "
        "remove one"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "found a list at the top level, expected `key: value` lines"),
        ("a: [", "expected the node content"),
        ("trainer.nnodes: 1", "trainer.nnodes: found a key with dots, expected nested groups"),
        ("1: 2", "1: unknown key"),
        ("3", "found a number at the top level, expected `key: value` lines"),
        ("a:\n\tb: 1", "line 2: found character '\\t' that cannot start any token; indent with"),
    ],
)
def test_files_that_do_not_contain_settings_are_refused(tmp_path, text, message):
    assert message in "\n".join(load_error(tmp_path, text=text))


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"absent\.yaml: the settings file does not exist"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(InputError, match="it is a folder; give the path to a YAML file"):
        load_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\x84\xff")
    with pytest.raises(InputError, match="it is not text; give the path to a YAML file"):
        load_config(tmp_path / "binary.yaml")


class TestOtherSpelling:
    """In verl, router_replay can be set in two places."""

    OTHER = f"{ACTOR}.megatron.router_replay"

    def test_is_the_same_setting(self, tmp_path):
        config = load(tmp_path, f'{self.OTHER}.mode="R2"').config
        assert config == load(tmp_path, f"{REPLAY}.mode=R2").config

    def test_both_may_agree_or_complement_each_other(self, tmp_path):
        replay = load(
            tmp_path, f"{self.OTHER}.mode=R2", f"{REPLAY}.mode=R2", f"{self.OTHER}.record_file=set"
        ).config.actor_rollout_ref.actor.router_replay
        assert (replay.mode, replay.record_file) == ("R2", "set")

    def test_errors_name_the_users_spelling(self, tmp_path):
        (problem,) = load_error(tmp_path, f"{self.OTHER}.mode=R4")
        assert problem.startswith(f"{REPLAY}.mode (written as {self.OTHER}.mode): found 'R4'")


@pytest.mark.parametrize(
    ("path", "overrides", "message"),
    [
        ("run.sh", (), "run: retrace import-verl run.sh -o my.yaml"),
        ("--config-name=mine", (), "one file: retrace import-verl FOLDER/NAME.yaml -o my.yaml"),
        (None, ("--config-path=x",), "--config-path=x: this is an option of verl's command line"),
        (None, ("data.seed=${trainer.seed}",), "resolve the file with `retrace import-verl`"),
    ],
)
def test_the_message_for_verls_files_names_the_import_command(tmp_path, path, overrides, message):
    minimal = tmp_path / "config.yaml"
    minimal.write_text(MINIMAL)
    with pytest.raises(InputError) as caught:
        load_config(path or minimal, overrides)
    assert message in str(caught.value)


def test_a_list_of_other_files_must_be_imported_first(tmp_path):
    """Until the files are combined, other errors in the file may be false, so only this error and
    those in overrides are reported."""
    hydra = "defaults: [ppo_trainer, _self_]\ntariner: {seed: 1}\n"
    (problem,) = load_error(tmp_path, text=hydra)
    assert problem.startswith("defaults: found ['ppo_trainer', '_self_'], Hydra's list of other")
    assert problem.endswith(f"one: retrace import-verl {tmp_path}/config.yaml -o my.yaml")
    assert len(load_error(tmp_path, "x", text=hydra)) == 2
    with pytest.raises(InputError, match=r"retrace import-verl CONFIG\.yaml"):
        load_config({"defaults": ["ppo_trainer", "_self_"]})
    (problem,) = load_error(tmp_path, "defaults=[]")
    assert problem.endswith("combines the files; leave the key out")


def test_a_setting_in_place_of_a_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"as in: retrace check my\.yaml data\.train_files="):
        load_config("data.train_files=a/b.parquet", ["trainer.seed=1"])
    with pytest.raises(InputError, match="the settings file does not exist"):
        load_config("seed=1.yaml")
    (tmp_path / "seed=1").write_text(MINIMAL)
    assert load_config("seed=1").config.trainer.experiment_name == "test"


def test_settings_that_are_nested_too_deep_are_refused(tmp_path):
    path = tmp_path / "deep.yaml"
    path.write_text("a: " + "[" * 5_000 + "]" * 5_000)
    with pytest.raises(InputError, match="nested too deep"):
        load_config(path)
