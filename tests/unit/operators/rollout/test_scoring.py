"""Rewards computed in separate processes.

An error in users' code names its sample and does not affect other samples. The code has no access
to credentials.
"""

import json
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from operators.rollout.prompts import Prompt, Wanted
from operators.rollout.scoring import ERROR_BYTES, Scorer
from pipeline.config.reward import Reward
from pipeline.rl.extra_means import ExtraSums, add_extras
from pipeline.rl.rewards import RewardError
from pipeline.scoring.code import RewardCode, pack
from pipeline.traces.format.domain import check_text, json_text
from tests.patience import PATIENCE_S, eventually

HEAD = """
import json, os, signal, sys, time
def compute_score(data_source, solution_str, ground_truth, extra_info):
"""
BY_TEXT = (
    HEAD
    + """
    if solution_str == "hang": time.sleep(10**6)
    if solution_str == "exit": os._exit(3)
    if solution_str == "crash": os.kill(os.getpid(), signal.SIGSEGV)
    if solution_str == "memory": bytearray(1 << 50)
    if solution_str == "raise": raise KeyError("no such rubric")
    if solution_str == "closed": os.closerange(3, 100)
    return {"score": len(solution_str), "truth": ground_truth, "info": extra_info, "é": "ü→"}
"""
)


MAX_LENGTH = 100


def planned(number: int, source: str = "by-hand", truth: object = "7") -> Wanted:
    prompt = Prompt((1, 2), source, truth, {"row": number})
    return Wanted(f"000000/{number}/0", f"000000/{number}", str(number), prompt, number)


def scorer(source: str | None, **settings) -> Scorer:
    code = RewardCode(None if source is None else source.encode())
    found = {"timeout_s": PATIENCE_S, "num_workers": 2, **settings}
    return Scorer(code, Reward.model_validate(found), PATIENCE_S, MAX_LENGTH)


def scores(scorer: Scorer, *texts: str):
    futures = [
        scorer.submit(planned(number), lambda text=text: text, 5)
        for number, text in enumerate(texts)
    ]
    return [future.result(PATIENCE_S) for future in futures]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("exit", "exit code 3"),
        ("crash", "SIGSEGV"),
        ("memory", "raised MemoryError"),
        ("raise", "raised KeyError: 'no such rubric' (reward.py, line 9)"),
        ("closed", "its process"),
    ],
)
def test_a_failure_affects_only_its_own_sample(text, says):
    """With `mask`, samples scored before and after the failed one in the same processes keep their
    rewards. With `fail`, only the future of the failed sample raises an error.
    """
    texts = ["a", "bb", text, "dddd", "eeeee", text, "ggggggg", "hhhhhhhh"]
    with scorer(BY_TEXT, on_error="mask") as masking:
        found = scores(masking, *texts)
    for number, (one, given) in enumerate(zip(found, texts, strict=True)):
        if given == text:
            assert one.reward is None
            assert one.extras == {}
            where = f"sample 000000/{number}/0 (data source 'by-hand'): "
            assert one.error.startswith(where)
            assert says in one.error
        else:
            assert (one.reward, one.error) == (len(given), None)
            assert one.extras == {"truth": "7", "info": {"row": number}, "é": "ü→"}
    with scorer(BY_TEXT, on_error="fail", num_workers=1) as failing:
        bad = failing.submit(planned(0), lambda: text, 5)
        good = failing.submit(planned(1), lambda: "bb", 5)
        with pytest.raises(RewardError, match="sample 000000/0/0"):
            bad.result(PATIENCE_S)
        assert good.result(PATIENCE_S).reward == 2


def test_a_hanging_reward_is_ended_with_its_child_processes(tmp_path):
    pids = tmp_path / "pids"
    source = (
        HEAD
        + f"""
    if solution_str == "hang":
        import subprocess
        child = subprocess.Popen(["sleep", "1000000"])
        with open({str(pids)!r}, "w") as file: file.write(f"{{os.getpid()}} {{child.pid}}")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child.wait()
    return 1
"""
    )
    with scorer(source, on_error="mask", timeout_s=5.0, num_workers=1) as masking:
        while not pids.exists():  # on a busy machine this may take longer than the limit
            hung, after = scores(masking, "hang", "fine")
    assert "sample 000000/0/0" in hung.error
    assert "within 5 s (reward.timeout_s)" in hung.error
    assert after.reward == 1
    for pid in map(int, pids.read_text().split()):
        eventually(lambda pid=pid: not runs(pid), lambda pid=pid: f"{pid} runs")


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_reward_file_has_no_access_to_credentials(tmp_path, monkeypatch):
    """The reward file records its environment, its open files and its imported modules."""
    secrets = {
        "AWS_ACCESS_KEY_ID": "s3cret-0", "AWS_SECRET_ACCESS_KEY": "s3cret-1",
        "AWS_SESSION_TOKEN": "s3cret-2", "AWS_WEB_IDENTITY_TOKEN_FILE": "s3cret-3",
        "AWS_PROFILE": "s3cret-4", "PREFECT_API_KEY": "s3cret-5", "PREFECT_API_AUTH_STRING":
        "s3cret-6", "PREFECT_API_URL": "s3cret-7", "KUBERNETES_SERVICE_HOST": "s3cret-8",
        "HF_TOKEN": "s3cret-9", "https_proxy": "http://u:s3cret@x", "SOMETHING_OF_OURS": "s3cret",
    }  # fmt: skip
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("REWARD_JUDGE_KEY", "given")
    secret_file = tmp_path / "open"
    with secret_file.open("w") as opened:
        os.set_inheritable(opened.fileno(), True)
        source = """
import os
SEEN = {
    "environment": dict(os.environ),
    "initial": open("/proc/self/environ").read(),
    "files": [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3, 100)
              if os.path.lexists(f"/proc/self/fd/{fd}")],
    "modules": sorted(__import__("sys").modules),
}
def compute_score(**kwargs):
    return {"score": 1, **SEEN}
"""
        with scorer(source) as scoring:
            [found] = scores(scoring, "")
    seen = found.extras
    assert "s3cret" not in json.dumps([seen["environment"], seen["initial"], seen["files"]])
    assert not secrets.keys() & seen["environment"].keys()
    assert seen["environment"]["REWARD_JUDGE_KEY"] == "given"
    assert seen["environment"]["PATH"] == os.environ["PATH"]
    assert str(secret_file) not in seen["files"]
    assert [name.partition(":")[0] for name in seen["files"]] == ["socket"]
    heavy = {"torch", "vllm", "boto3", "prefect", "pydantic", "numpy"}
    assert not heavy & {name.partition(".")[0] for name in seen["modules"]}


def test_objects_that_a_function_returns_do_not_run_code_here(tmp_path):
    """Objects that carry code arrive as plain data."""
    marker = tmp_path / "ran"
    source = f"""
import os
class Text(str):
    def __reduce__(self): return os.system, ("touch {marker}",)
def compute_score(**kwargs):
    return {{"score": 1, "x": Text("plain")}}
"""
    with scorer(source) as scoring:
        [found] = scores(scoring, "")
    assert found.extras == {"x": "plain"}
    assert type(found.extras["x"]) is str
    assert not marker.exists()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise ValueError('x')", "ValueError: x"),
        ("import os; os._exit(9)", "exit code 9"),
        ("compute_score = 3", "found no function"),
        ("import os\nKEY = os.environ['OPENAI_API_KEY']", "REWARD_OPENAI_API_KEY"),
    ],
)
def test_a_file_that_cannot_be_loaded_fails_immediately(source, says):
    """`on_error` has no effect, because no sample could be scored."""
    with pytest.raises(RewardError) as caught:
        scorer(source, on_error="mask")
    assert says in str(caught.value)


def test_closing_ends_hanging_processes(tmp_path):
    source = (
        HEAD
        + f"""
    open({str(tmp_path / "begun")!r}, "w").write(str(os.getpid()))
    time.sleep(10**6)
"""
    )
    before = set(psutil.Process().children())  # started by other tests
    scoring = scorer(source, timeout_s=None)
    futures = [scoring.submit(planned(number), lambda: "", 5) for number in range(5)]
    eventually((tmp_path / "begun").exists, lambda: "no sample was started")
    closing = threading.Thread(target=scoring.close)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert all(future.done() for future in futures)
    assert not set(psutil.Process().children()) - before


def test_processes_end_when_their_worker_is_killed(tmp_path):
    """Processes that are scoring a sample also end."""
    source = (
        HEAD
        + f"""
    open({str(tmp_path)!r} + "/" + str(os.getpid()), "w")
    time.sleep(10**6)
"""
    )
    program = f"""
import time
from tests.unit.operators.rollout.test_scoring import scorer, planned
scoring = scorer({source!r}, timeout_s=None)
for number in range(2):
    scoring.submit(planned(number), lambda: "", 5)
time.sleep(10**6)
"""
    worker = subprocess.Popen([sys.executable, "-c", program])
    try:
        eventually(
            lambda: len(list(tmp_path.iterdir())) == 2, lambda: "fewer than two samples started"
        )
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    for path in tmp_path.iterdir():
        eventually(lambda path=path: not runs(int(path.name)), lambda path=path: f"{path} runs")


def test_without_a_file_the_data_source_selects_the_scorer():
    """An answer that a built-in scorer cannot compare in time gets the scorer's lowest score: 0,
    or -1 for the scorers that give -1 in verl."""
    with scorer(None) as scoring:
        found = {
            source: scoring.submit(planned(0, source, "34"), lambda text=text: text, 5)
            for source, text in {"openai/gsm8k": "#### 34", "math_dapo": "Answer: $35$"}.items()
        }
        assert {source: future.result(PATIENCE_S).reward for source, future in found.items()} == {
            "openai/gsm8k": 1.0,
            "math_dapo": -1.0,
        }
    with scorer(None, timeout_s=0.01, num_workers=1) as scoring:
        late = scoring.submit(planned(2, "math_dapo", "3"), lambda: "Answer: 9^{9^{9^{9}}}", 5)
        assert late.result(PATIENCE_S).reward == -1.0
        assert late.result().error is None


def test_the_penalty_on_long_responses_equals_verls():
    """The penalty for each length is the same as in verl's reward manager `dapo`."""
    overlong = {"enable": True, "len": 40, "penalty_factor": 0.5}
    source = HEAD + "    return {'score': float(solution_str)}"
    with scorer(
        source, on_error="mask", reward_kwargs={"overlong_buffer_cfg": overlong}
    ) as scoring:
        lengths = [1, 59, 60, 61, 80, 100]
        futures = [scoring.submit(planned(length), lambda: "1", length) for length in lengths]
        found = [future.result(PATIENCE_S) for future in futures]
        masked = scoring.submit(planned(7), lambda: "no number", 100).result(PATIENCE_S)
    for length, one in zip(lengths, found, strict=True):
        exceed = length - (MAX_LENGTH - 40)  # verl/workers/reward_manager/dapo.py
        penalty = min(-exceed / 40 * 0.5, 0)
        assert one.reward == 1 + penalty
        assert one.extras == {"overlong_reward": penalty}
    assert [one.reward for one in found] == [1, 1, 1, 0.9875, 0.75, 0.5]
    assert (masked.reward, masked.extras) == (None, {})


ODD = (
    HEAD
    + """
    if solution_str == "text": raise ValueError("a\\ud800b\\0c\\x1b[2J\\n\\td")
    if solution_str == "long": raise ValueError("é" * (1 << 20))
    kept = {"score": 1, "kept": 2}
    if solution_str == "number": return {**kept, "n": 10**400}
    if solution_str == "large": return {"n": "x" * (1 << 20), **kept}
    if solution_str == "many": return {**kept, **{f"n{i}": "x" * (1 << 18) for i in range(4)}}
    if solution_str == "name": return {**kept, "\\ud800": 1}
    if solution_str == "nan": return {**kept, "n": float("nan"), "m": {1, 2}}
    return {**kept, "half": "\\ud800"}
"""
)


@pytest.mark.parametrize(
    ("text", "says"), [("text", "a\ufffdb\ufffdc\ufffd[2J\n\td"), ("long", "éé...")]
)
def test_the_text_of_an_error_is_cleaned_and_shortened(text, says):
    with scorer(ODD, on_error="mask") as scoring:
        [found] = scores(scoring, text)
    assert (found.reward, found.extras) == (None, {})
    assert found.error is not None
    assert says in found.error
    assert len(found.error.encode()) <= ERROR_BYTES
    check_text(found.error, "reward_error")


@pytest.mark.parametrize("penalty", [False, True])
def test_values_that_no_trace_can_hold_are_left_out_and_counted(penalty):
    """Only the score can make a sample fail, also with on_error=fail."""
    overlong = {"enable": penalty, "len": 40, "penalty_factor": 0.5}
    with scorer(ODD, reward_kwargs={"overlong_buffer_cfg": overlong}) as scoring:
        names = ["number", "large", "many", "name", "nan", "half"]
        found = dict(zip(names, scores(scoring, *names), strict=True))
    assert {name: one.left_out for name, one in found.items()} == {
        "number": 0, "large": 1, "many": 1, "name": 1, "nan": 2, "half": 1,
    }  # fmt: skip
    for name, one in found.items():
        assert (one.reward, one.error, one.extras["kept"]) == (1, None, 2)
        assert len(one.extras) == {"many": 4, "number": 2}.get(name, 1) + penalty
        json_text(one.extras, name)
        sums: ExtraSums = {}
        add_extras(sums, one.extras)
        assert (sums["kept"], "n" in sums) == ([2.0, 1], False)


def test_modules_next_to_the_file_can_be_imported():
    """Packages keep their data, and each process imports the modules."""
    files = {
        "mine.py": b"from helper import rate\ncompute_score = lambda **sample: rate(sample)",
        "helper.py": b"from pack.part import points\ndef rate(sample): return points()",
        "pack/__init__.py": b"",
        "pack/part.py": b"""
from pathlib import Path
def points():
    return {"score": len(Path(__file__).with_name("words.txt").read_text()), "file": __file__}
""",
        "pack/words.txt": b"abc",
    }
    code = RewardCode(pack(files))
    with Scorer(code, Reward(num_workers=2), PATIENCE_S, MAX_LENGTH) as scoring:
        found = scores(scoring, "a", "b")
    assert [one.reward for one in found] == [3, 3]
    assert not os.path.exists(found[0].extras["file"])


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("return os.environ['OPENAI_API_KEY']", "REWARD_OPENAI_API_KEY"),
        ("return len(os.getenv('JUDGE_MODEL'))", "REWARD_JUDGE_MODEL"),
        ("raise ValueError('OPENAI_API_KEY must be set')", "REWARD_OPENAI_API_KEY"),
        ("return {}['NOT_A_VARIABLE']", None),
        ("return os.environ['REWARD_KEY']", None),
    ],
)
def test_an_error_names_the_rule_for_environment_variables(monkeypatch, body, named):
    """The rule is part of an error if the function lacks a variable that is not passed."""
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    monkeypatch.delenv("REWARD_KEY", raising=False)
    with scorer(HEAD + f"    {body}", on_error="mask") as scoring:
        [found] = scores(scoring, "")
    assert ("names begin with REWARD_" in found.error) == (named is not None)
    assert named is None or named in found.error


def test_a_reward_may_use_signals_without_affecting_the_next_sample():
    """Alarms work because the function runs in the main thread. An alarm that the function leaves
    set does not interrupt the next sample."""
    source = (
        HEAD
        + """
    def ring(number, frame): raise TimeoutError("rang")
    if solution_str == "next":
        time.sleep(0.3)
        return signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    signal.signal(signal.SIGALRM, ring)
    if solution_str == "left":
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return 1
    signal.alarm(1)
    time.sleep(10**6)
"""
    )
    with scorer(source, on_error="mask", num_workers=1) as masking:
        [rang, left, after] = scores(masking, "rings", "left", "next")
    assert "raised TimeoutError: rang" in rang.error
    assert (left.reward, after.reward) == (1, 1)
