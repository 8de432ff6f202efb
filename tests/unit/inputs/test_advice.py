"""Users can follow the advice in error messages, and the result is accepted.

Each case breaks a valid run, finds the advice in the message, follows it and starts again.
"""

import ast
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.config.keys import all_keys
from pipeline.errors import InputError
from pipeline.inputs.check import check_inputs
from pipeline.inputs.stage import prepare
from pipeline.policies.versions import publish_policy
from pipeline.rl.rewards import MEND, RewardError, load_reward, score
from pipeline.run import keys
from pipeline.store import open_store
from tests.paths import ROOT
from tests.unit.inputs.small_inputs import REPLAY, load, use, verl_rows, write_prompts

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MEGATRON = f"{ACTOR}.megatron"
MODEL = "actor_rollout_ref.model.path"
REWARD = "custom_reward_function"


def problems(settings: Path, *overrides: str) -> tuple[str, ...]:
    """Return the problems with a run's inputs."""
    try:
        check_inputs(load(settings, *overrides))
    except InputError as error:
        return error.problems
    return ()


def follow(settings: Path, broken: tuple[str, ...], advice: str, *following: str) -> None:
    """Find the advice, and start the run with `following` in place of the broken settings.

    The message must name every value that the test sets, either as `key=value` or, if the message
    begins with the key, after `write` or `set it to`.
    """
    found = problems(settings, *broken)
    (problem,) = (one for one in found if advice in one)
    for word in following:
        key, _, value = word.partition("=")
        wanted = rf"((a )?multiple|(at most |one of [\d, ]*)?{re.escape(value)})\b"
        written = rf"(write|set it to) {wanted}"
        said = word in problem or f"{word.split('.')[-1]}" in problem
        assert said or (problem.startswith(key) and re.search(written, problem)), (word, problem)
    replaced = {word.partition("=")[0] for word in following}
    kept = [word for word in broken if word.partition("=")[0] not in replaced]
    assert problems(settings, *kept, *following) == ()


SETTINGS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "batch": (
        ("data.train_batch_size=11", f"{ACTOR}.ppo_mini_batch_size=1"),
        "set it to at most 10, or add prompts",
        ("data.train_batch_size=10",),
    ),
    "mini-batch": (
        (f"{ACTOR}.ppo_mini_batch_size=3",),
        "write 2",
        (f"{ACTOR}.ppo_mini_batch_size=2",),
    ),
    "response": (
        ("data.max_response_length=500",),
        "write at most 480, or reduce data.max_prompt_length",
        ("data.max_response_length=480",),
    ),
    "prompt": (
        ("data.max_prompt_length=600",),
        "write at most 504",
        ("data.max_prompt_length=504",),
    ),
    "long prompts": (
        ("data.max_prompt_length=12",),
        "set it to 15, drop them",
        ("data.max_prompt_length=15",),
    ),
    "long prompts, cut": (
        ("data.max_prompt_length=12",),
        "cut them with data.truncation=left",
        ("data.truncation=left",),
    ),
    "token budget": (
        (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=8"),
        "or more",
        (f"{ACTOR}.ppo_max_token_len_per_gpu=40",),
    ),
    "token budget of two ranks": (
        (
            "trainer.n_gpus_per_node=2",
            f"{MEGATRON}.context_parallel_size=2",
            f"{ACTOR}.use_dynamic_bsz=True",
            f"{ACTOR}.ppo_max_token_len_per_gpu=8",
        ),
        "context_parallel_size=2; write",
        (f"{ACTOR}.ppo_max_token_len_per_gpu=20",),
    ),
    "token budget, padded": (
        (f"{ACTOR}.use_dynamic_bsz=True", f"{MEGATRON}.use_remove_padding=False"),
        "write use_remove_padding=true",
        (f"{MEGATRON}.use_remove_padding=true",),
    ),
    "token budget of log-probs": (
        (f"{ROLLOUT}.log_prob_use_dynamic_bsz=True", f"{ROLLOUT}.log_prob_max_token_len_per_gpu=8"),
        "or more",
        (f"{ROLLOUT}.log_prob_max_token_len_per_gpu=40",),
    ),
    "no rollout": (
        ("launch.rollout_workers=0",),
        "write 1 or more",
        ("launch.rollout_workers=1",),
    ),
    "rank": (
        ("trainer.n_gpus_per_node=3", f"{MEGATRON}.tensor_model_parallel_size=2"),
        "write a multiple",
        ("trainer.n_gpus_per_node=4",),
    ),
    "expert-TP": (
        (
            "trainer.n_gpus_per_node=2",
            f"{MEGATRON}.tensor_model_parallel_size=2",
            f"{MEGATRON}.expert_tensor_parallel_size=1",
        ),
        "write 2 or null",
        (f"{MEGATRON}.expert_tensor_parallel_size=2",),
    ),
    "VPP": (
        (f"{MEGATRON}.virtual_pipeline_model_parallel_size=2",),
        "write null",
        (f"{MEGATRON}.virtual_pipeline_model_parallel_size=null",),
    ),
    "EP": (
        (
            "trainer.n_gpus_per_node=3",
            f"{ACTOR}.ppo_mini_batch_size=4",
            f"{MEGATRON}.expert_model_parallel_size=3",
        ),
        "write one of 1, 2, 4, 8, 16",
        (f"{MEGATRON}.expert_model_parallel_size=1",),
    ),
    "R3": (
        (f"{REPLAY}.mode=R3",),
        f"add {ROLLOUT}.enable_rollout_routing_replay=True",
        (f"{ROLLOUT}.enable_rollout_routing_replay=True",),
    ),
    "top_p": (
        (f"{ROLLOUT}.top_p=0.9",),
        "write 1.0",
        (f"{ROLLOUT}.top_p=1.0",),
    ),
    "top_k": ((f"{ROLLOUT}.top_k=5",), "write -1", (f"{ROLLOUT}.top_k=-1",)),
    "dropout": (
        (f"{MEGATRON}.override_transformer_config.hidden_dropout=0.1",),
        "write 0.0",
        (f"{MEGATRON}.override_transformer_config.hidden_dropout=0.0",),
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_advice_about_settings_leads_to_a_valid_run(settings, case):
    broken, advice, following = SETTINGS[case]
    follow(settings, broken, advice, *following)


def test_a_recorded_set_is_possible_once_replay_is_enabled(settings):
    record = f"{REPLAY}.record_file={settings.parent}/set"
    follow(settings, (record,), "write mode=R2 or mode=R3", f"{REPLAY}.mode=R2")


def test_a_place_with_a_recorded_set_can_be_changed_or_freed(settings):
    """The user chooses a different place, or removes the set."""
    place = settings.parent / "set"
    open_store(str(place)).create(keys.manifest(0), b"{}")
    words = (f"{REPLAY}.mode=R2", f"{REPLAY}.record_file={place}")
    (problem,) = problems(settings, *words)
    assert "choose a different place, or remove the set" in problem
    assert problems(settings, *words[:1], f"{REPLAY}.record_file={place}-2") == ()
    shutil.rmtree(place)
    assert problems(settings, *words) == ()


def test_prompts_that_are_too_long_can_be_dropped(settings):
    rows = verl_rows(10)
    rows[3]["prompt"][0]["content"] *= 9
    write_prompts(settings.parent / "train.parquet", rows)
    advice = "drop them with data.filter_overlong_prompts=True"
    follow(settings, (), advice, "data.filter_overlong_prompts=True")


def missing_column(settings: Path) -> tuple[str, ...]:
    rows = [{**row, "question": row["prompt"]} for row in verl_rows(10)]
    for row in rows:
        del row["prompt"]
    write_prompts(settings.parent / "train.parquet", rows)
    return ("data.prompt_key=question",)


def other_name(settings: Path) -> tuple[str, ...]:
    path = settings.parent / "reward.py"
    path.write_text(path.read_text().replace("compute_score", "mine"))
    return (f"{REWARD}.name=mine",)


FILES: dict[str, tuple[Callable[[Path], tuple[str, ...]], str]] = {
    "column": (missing_column, "set data.prompt_key to the name of the right column"),
    "function": (other_name, f"or set {REWARD}.name"),
}


@pytest.mark.parametrize("case", FILES)
def test_settings_can_be_changed_to_fit_the_files(settings, case):
    break_it, advice = FILES[case]
    words = break_it(settings)
    (problem,) = problems(settings)
    assert advice in problem
    assert problems(settings, *words) == ()


def test_missing_files_of_the_model_can_be_added(settings, model, tmp_path):
    """The user adds the file that the message names."""
    for name, advice in (
        ("tokenizer.json", "create one with transformers"),
        ("chat_template.jinja", "add chat_template.jinja"),
        ("config.json", "give the folder of a Hugging Face model"),
    ):
        if not (model / name).is_file():
            continue
        copy = tmp_path / name.partition(".")[0]
        shutil.copytree(model, copy)
        (copy / name).unlink()
        found = problems(settings, f"{MODEL}={copy}")
        assert [one for one in found if advice in one], (name, found)
        shutil.copy(model / name, copy)
        assert problems(settings, f"{MODEL}={copy}") == ()


RAISING = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    raise KeyError(ground_truth)
"""


def raised(settings: Path) -> str:
    """Return the error of a worker whose reward function raises an exception."""
    (settings.parent / "reward.py").write_text(RAISING)
    config = load(settings)
    prepare(config)
    assert config.custom_reward_function is not None
    function = load_reward(RAISING.encode(), config.custom_reward_function.name)
    with pytest.raises(RewardError) as caught:
        score(
            function,
            sample_id="000000/1/0",
            data_source="add",
            solution_str="2",
            ground_truth="2",
            extra_info=None,
        )
    return str(caught.value)


def mended_reward(settings: Path) -> tuple[str, ...]:
    path = settings.parent / "reward.py"
    path.write_text(path.read_text().replace("raise KeyError(ground_truth)", "return 1.0"))
    return ()


def masked(settings: Path) -> tuple[str, ...]:
    return ("reward.on_error=mask",)


@pytest.mark.parametrize(
    ("way", "advice"), [(mended_reward, "fix it"), (masked, "set reward.on_error=mask")]
)
@pytest.mark.parametrize("used", [False, True])
def test_a_reward_function_that_raises_can_be_fixed_or_masked(settings, model, way, advice, used):
    """Until the function has scored a sample, the fixed run can keep its name. Afterwards, it needs
    the new name that the error message suggests."""
    raised(settings)
    assert advice in MEND
    store = open_store(str(settings.parent / "store/test"))
    if used:
        use(store)
        publish_policy(store, 1, model)
    words = way(settings)
    if not used:
        assert prepare(load(settings, *words)).amended is not None
        return
    (problem,) = problems(settings, *words)
    new = problem.partition(": add ")[2].split()
    run = prepare(load(settings, *words, *new))
    assert (run.name, run.amended) == ("test-2", None)


def test_workers_advice_can_be_followed_in_an_existing_run():
    """Workers advise users to change only the run's name, or settings that may be changed whenever
    a run is started."""
    may_change = {name for name, key in all_keys().items() if key.operational}
    may_change.add("trainer.experiment_name")  # a new run
    refused = [
        (path, name)
        for path, text in messages()
        if path.startswith(("operators", "pipeline/launch", "pipeline/run"))
        for name in advised(text)
        if name not in may_change
    ]
    assert not refused


def advised(text: str) -> list[str]:
    """Return the dotted keys of the settings that a text advises changing."""
    parts = re.findall(r"\b(?:raise|lower|set|write|choose|use|add the line) ([^;]*)", text)
    names = {name for part in parts for name in re.findall(r"(?:[a-z_]+\.)+[a-z_]+", part)}
    groups = {part for name in all_keys() for part in name.split(".")[:-1]}
    return sorted(name for name in names if name.partition(".")[0] in groups)


def messages() -> Iterator[tuple[str, str]]:
    """Yield every string in the source code except docstrings, with its module's path."""
    for package in ("pipeline", "operators", "retrace"):
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text())
            skipped = {
                id(node.value)
                for node in ast.walk(tree)
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr):
                    skipped |= {id(part) for part in node.values}
                    parts = (p.value if isinstance(p, ast.Constant) else "\0" for p in node.values)
                    yield str(path.relative_to(ROOT)), "".join(map(str, parts))
                elif id(node) not in skipped and isinstance(node, ast.Constant):
                    yield str(path.relative_to(ROOT)), str(node.value)


def test_advice_names_settings_that_exist():
    """Messages contain the full key of a setting, including all groups."""
    unknown = {
        (path, name)
        for path, text in messages()
        for name in advised(text)
        if name not in all_keys()
    }
    assert not unknown
