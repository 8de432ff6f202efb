"""The first hour on GPUs: the steps, what is expected of each, and a report. See gpu_hour.sh."""

import argparse
import ast
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import retrace
from pipeline.config.reading.load import load_config
from pipeline.config.rules.check import config_problems
from pipeline.device import choose_device
from pipeline.errors import InputError
from pipeline.hardware import gpu_pool
from pipeline.launch.guard import start_guarded

ROOT = Path(__file__).resolve().parent.parent
RETRACE = ("-c", "from pipeline.cli import main; main()")
EXAMPLE = "examples/quickstart.yaml"
ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
DEVICE = "cuda"
LIMIT_S, TOTAL_S = 1200.0, 3600.0
"""Of a step, and of all together: steps that are left then are not run."""
MOST_KL, LEAST_AGREEMENT, FULL = 1e-3, 0.9, 1.0
"""Of the example on one machine: mean KL of engine and trainer, agreement, coverage."""

Judge = Callable[[str, Path], str | None]
"""From a step's output and the folder: what was missed; None: nothing."""


@dataclass(frozen=True)
class Step:
    """One command and what is expected of it."""

    name: str
    command: tuple[str, ...]
    """Words after `python`."""
    expected: str
    gpus: int = 1
    judge: Judge = lambda output, folder: None
    """Beside exit code 0, which is always expected."""


def no_missed_limit(output: str, _: Path) -> str | None:
    """Benchmarks mark a limit that was not kept."""
    return next((line.strip() for line in output.splitlines() if "**missed**" in line), None)


def nothing_skipped(output: str, _: Path) -> str | None:
    """A test that was skipped has shown nothing."""
    found = re.search(r"\d+ (skipped|deselected).*", output)
    passed = re.search(r"(\d+) passed", output)
    if passed is None or (found is not None and "skipped" in found[0]):
        return f"not all tests ran: {output.strip().splitlines()[-1]}"
    return None


def replayed(run: str) -> Judge:
    """The run's own numbers: every row replayed, and engine and trainer agree."""

    def judge(_: str, folder: Path) -> str | None:
        rows = retrace.open_run(folder / "store" / run).metrics().to_pylist()
        coverage = min(row["replay/coverage"] for row in rows)
        agreement = min(row["replay/agreement"] for row in rows)
        kl = sum(row["mismatch/kl"] for row in rows) / len(rows)
        missed = coverage < FULL or agreement < LEAST_AGREEMENT or not kl < MOST_KL
        told = f"coverage {coverage:.3f}, agreement {agreement:.3f}, KL {kl:.1e}"
        return told if missed else None

    return judge


def same_bits(run: str) -> Judge:
    """With the same weights, the replayed pass differs from the recorded one in nothing."""

    def judge(_: str, folder: Path) -> str | None:
        rows = retrace.open_run(folder / "store" / run).metrics().to_pylist()
        wrong = [
            f"step {row['step']}: {name} {row[name]}"
            for row in rows
            for name, exact in (("actor/ppo_kl", 0.0), ("replay/agreement", FULL))
            if row[name] != exact
        ]
        return "; ".join(wrong) or None

    return judge


def run_words(folder: Path, name: str, *settings: str) -> tuple[str, ...]:
    """`retrace run` of the example under another name, in the report's folder."""
    return (
        *RETRACE,
        "run",
        EXAMPLE,
        f"trainer.experiment_name={name}",
        f"store.uri={folder}/store",
        f"trainer.default_local_dir={folder}/local",
        f"trainer.device={DEVICE}",
        *settings,
    )


def of_set(folder: Path, ranks: int, *settings: str) -> tuple[str, ...]:
    """Settings of a run that replays what the quickstart recorded: all GPUs are the trainer's."""
    return (
        f"{ACTOR}.router_replay.replay_file={folder}/set",
        "data.val_files=null",
        f"trainer.n_gpus_per_node={ranks}",
        "trainer.total_training_steps=2",
        *settings,
    )


def tests(*nodes: str) -> tuple[str, ...]:
    """pytest on some tests."""
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", *nodes)


SHARED = ("actor_rollout_ref.rollout.gpu_memory_utilization=0.4",)
"""Trainer and engine share the GPU of a machine that has one."""
PACKED = f"{MEGATRON}.use_remove_padding"
ONE_UPDATE = (
    f"{ACTOR}.router_replay.mode=R2",
    f"{ACTOR}.ppo_mini_batch_size=32",
    "trainer.total_training_steps=2",
    "data.val_files=null",
)
"""With one optimizer step for each step, the update pass has the weights of the log-prob pass."""
LAYOUTS = {
    "one": (1, ()),
    "tp2": (2, ("tensor_model_parallel_size=2",)),
    "ep2": (2, ("expert_model_parallel_size=2",)),
    "cp2": (2, ("context_parallel_size=2",)),
    "pp2": (2, ("pipeline_model_parallel_size=2",)),
    "tp2-pp2-ep2": (
        8,
        (
            "tensor_model_parallel_size=2",
            "pipeline_model_parallel_size=2",
            "expert_model_parallel_size=2",
        ),
    ),
}
"""Ranks and settings of the trainer in which R3 is replayed."""


def plan(folder: Path) -> list[Step]:
    """All steps in order."""
    told = f"exit code 0, coverage 100%, agreement >= {LEAST_AGREEMENT:.0%}, KL < {MOST_KL:.0e}"
    model = "tests/integration/training_model/test_round_trip.py"
    engine = "tests/integration/rollout/test_engine.py"
    record = (f"{ACTOR}.router_replay.record_file={folder}/set", *SHARED)
    return [
        Step("doctor", (*RETRACE, "doctor", EXAMPLE), "no line is broken"),
        Step(
            "quickstart", run_words(folder, "quickstart", *record), told, 1, replayed("quickstart")
        ),
        Step(
            "routes against an independent forward",
            tests(f"{engine}::test_routes_and_logprobs_equal_an_independent_forward"),
            "the engine's routes and log-probs are those of transformers",
            1,
            nothing_skipped,
        ),
        *(
            Step(
                f"R2: a replayed native pass, {name}",
                run_words(folder, f"r2-{name}", *SHARED, *ONE_UPDATE, f"{PACKED}={packed}"),
                "the update pass has the log-probs of the native pass, bit by bit",
                1,
                same_bits(f"r2-{name}"),
            )
            for name, packed in (("packed", True), ("padded", False))
        ),
        *(
            Step(
                f"R3 in layout {name}",
                run_words(
                    folder,
                    f"r3-{name}",
                    *of_set(folder, ranks, *(f"{MEGATRON}.{setting}" for setting in settings)),
                ),
                told,
                ranks,
                replayed(f"r3-{name}"),
            )
            for name, (ranks, settings) in LAYOUTS.items()
        ),
        Step(
            "save, kill -9, resume",
            ("scripts/gpu_hour.py", "--resume", "--out", str(folder)),
            "the run ends, and no policy that is made again differs",
        ),
        Step(
            "export round trip",
            tests(f"{model}::test_export_is_bit_identical"),
            "weights come back from Megatron bit by bit",
            2,
            nothing_skipped,
        ),
        Step(
            "packed against padded",
            ("-m", "benchmarks.training"),
            ">= 3x fewer padded positions, >= 2x tokens/s",
            1,
            no_missed_limit,
        ),
        Step("replay overhead", ("-m", "benchmarks.replay"), "<= 1%", 1, no_missed_limit),
        Step(
            "peak memory against the estimate",
            ("scripts/gpu_peak.py",),
            "the peak is at most the estimate, and at least half of it",
            1,
            no_missed_limit,
        ),
    ]


def resume(folder: Path) -> None:
    """Kill a run after its first checkpoint, run it to its end, and compare its policies."""
    words = run_words(folder, "resumed", *of_set(folder, 1, "trainer.save_freq=1"))
    store = retrace.open_store(str(folder / "store/resumed"))
    process = subprocess.Popen((sys.executable, *words), cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + LIMIT_S / 2
    while process.poll() is None and not any(store.list("checkpoints/")):
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    found = any(store.list("checkpoints/"))
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if not found:
        raise SystemExit("no checkpoint before the run ended or the time was over")
    subprocess.run((sys.executable, *words), cwd=ROOT, check=True)
    rows = retrace.open_run(folder / "store/resumed").metrics().to_pylist()
    drift = sum(row.get("resume/policy_drift") or 0 for row in rows)
    if drift:
        raise SystemExit(f"{drift} policies that were made again differ")
    subprocess.run(
        (sys.executable, *RETRACE, "traces", "verify", f"{folder}/store/resumed"), check=True
    )


def problem_of(step: Step) -> str | None:
    """Why a step's command is not what was meant; None: it exists, and its settings are right."""
    words = step.command
    if words[:2] == RETRACE:
        try:
            loaded = load_config(ROOT / words[3], words[4:])
        except InputError as error:
            return str(error)
        return next(iter(config_problems(loaded.config, None)), None)
    if words[:2] == ("-m", "pytest"):
        for node in words[5:]:
            path, _, name = node.partition("::")
            tree = ast.parse((ROOT / path).read_text())
            if not any(getattr(one, "name", None) == name for one in tree.body):
                return f"{node} is not there"
        return None
    if words[0] == "-m":
        return None if importlib.util.find_spec(words[1]) else f"{words[1]} is not there"
    return None if (ROOT / words[0]).is_file() else f"{words[0]} is not there"


def run_guarded(
    words: Sequence[str], log: Path, devices: Sequence[str], limit_s: float
) -> int | None:
    """Run `python WORDS` on some GPUs; the exit code, or None: not done after `limit_s` seconds.

    Nothing that it has started outlives it, in whatever session.
    """
    shown = {"CUDA_VISIBLE_DEVICES": ",".join(devices), "PYTHONSAFEPATH": ""}
    with log.open("wb") as output:
        guard = start_guarded((sys.executable, *words), output, shown)
    try:
        return guard.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        guard.communicate()  # closes the pipe: the guard kills what is left, and ends


def make(step: Step, folder: Path, devices: Sequence[str], limit_s: float) -> str:
    """Run a step; the verdict for the report. Its whole output is in the folder."""
    log = folder / f"{re.sub(r'[^a-z0-9]+', '-', step.name.lower())}.log"
    code = run_guarded(step.command, log, devices, limit_s)
    if code is None:
        return f"**missed**: not done after {limit_s:.0f} s"
    text = log.read_text(errors="replace")
    if code:
        last = (text.strip().splitlines() or ["no output"])[-1]
        return f"**missed**: exit code {code}: {last}"
    try:
        missed = step.judge(text, folder)
    except Exception as error:  # noqa: BLE001 - a later step may still succeed
        missed = f"{type(error).__name__}: {error}"
    return "met" if missed is None else f"**missed**: {missed}"


def listed_gpus() -> str:
    """What nvidia-smi lists, or why it does not."""
    try:
        done = subprocess.run(("nvidia-smi", "-L"), capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    return done.stdout + done.stderr


def report(folder: Path, gpus: int, listed: str, rows: Sequence[tuple[Step, str, float]]) -> str:
    """The page of what was found so far; `listed` are the machine's GPUs."""
    lines = [
        f"# The first hour on {gpus} GPUs",
        "",
        *(f"    {line}" for line in listed.split("\n")),
    ]
    lines += ["", f"Each step's output is in {folder.name}/*.log.", ""]
    lines += ["| step | expected | found | s |", "|---|---|---|---|"]
    for step, verdict, seconds in rows:
        lines.append(f"| {step.name} | {step.expected} | {verdict} | {seconds:.0f} |")
    return "\n".join([*lines, ""])


def make_all(steps: Sequence[Step], folder: Path, devices: Sequence[str]) -> int:
    """Run the steps within TOTAL_S, and write the report after each; the exit code."""
    began, listed = time.monotonic(), listed_gpus()
    rows: list[tuple[Step, str, float]] = []
    for step in steps:
        started = time.monotonic()
        left_s = TOTAL_S - (started - began)
        if step.gpus > len(devices):
            verdict = f"not run: it needs {step.gpus} GPUs"
        elif left_s <= 0:
            verdict = f"**missed**: not run: {TOTAL_S:.0f} s were over"
        else:
            verdict = make(step, folder, devices, min(LIMIT_S, left_s))
        rows.append((step, verdict, time.monotonic() - started))
        print(f"{step.name}: {verdict}", flush=True)
        (folder / "report.md").write_text(report(folder, len(devices), listed, rows))
    print(f"the report: {folder / 'report.md'}")
    return 1 if any("**missed**" in verdict for _, verdict, _ in rows) else 0


def try_plan(folder: Path) -> int:
    """Print the plan and whether each command exists; the exit code."""
    bad = 0
    for step in plan(folder):
        why = problem_of(step)
        bad += why is not None
        print(f"{step.name} ({step.gpus} GPUs): expected: {step.expected}")
        print(f"  python {' '.join(step.command)}" + (f"\n  WRONG: {why}" if why else ""))
    print("a dry run: nothing was run, and nothing is claimed")
    return 1 if bad else 0


def main(arguments: argparse.Namespace) -> int:
    """Print or make the plan; the exit code."""
    folder: Path = arguments.out.resolve()
    os.chdir(ROOT)
    if arguments.resume:
        resume(folder)
        return 0
    if arguments.dry_run:
        return try_plan(folder)
    nothing = "nothing was run, and nothing is claimed"
    try:
        choose_device("cuda")
    except InputError as error:
        print(f"{nothing}: {error}", file=sys.stderr)
        return 2
    pool = gpu_pool()
    if arguments.gpus and arguments.gpus > len(pool):
        print(f"{nothing}: --gpus {arguments.gpus}, found {len(pool)}", file=sys.stderr)
        return 2
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        print(f"{nothing}: {folder} exists; name a new folder: --out FOLDER", file=sys.stderr)
        return 2
    return make_all(plan(folder), folder, pool[: arguments.gpus])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpus", type=int, choices=(1, 2, 8), help="how many; none: all")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu-hour"), help="a new folder")
    parser.add_argument("--dry-run", action="store_true", help="print and check the plan")
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    sys.exit(main(parser.parse_args()))
