"""Check Retrace in its first hour on GPUs: run steps, check their results, and write a report.

Run this program with gpu_hour.sh.
"""

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
from pipeline.run.restarts import finished_steps, restarts

ROOT = Path(__file__).resolve().parent.parent
RETRACE = ("-c", "from pipeline.cli import main; main()")
EXAMPLE = "examples/quickstart.yaml"
ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
DEVICE = "cuda"
LIMIT_S, TOTAL_S = 1200.0, 3600.0
"""Time limits in seconds, for one step and for all steps together. Steps that have not started when
the total limit is reached are not run."""
MOST_KL, LEAST_AGREEMENT, FULL = 1e-3, 0.9, 1.0
"""Limits for the example on one machine: the maximum mean KL between engine and trainer, the
minimum agreement, and the required coverage."""

Judge = Callable[[str, Path], str | None]
"""A check of a step's output and of the report's folder; returns the missed expectation or None."""


@dataclass(frozen=True)
class Step:
    """One command and its expected result."""

    name: str
    command: tuple[str, ...]
    """Arguments of `python`."""
    expected: str
    gpus: int = 1
    judge: Judge = lambda output, folder: None
    """An additional check. Exit code 0 is always expected."""


def no_missed_limit(output: str, _: Path) -> str | None:
    """Return the first line that a benchmark marks as missed, or None."""
    return next((line.strip() for line in output.splitlines() if "**missed**" in line), None)


def nothing_skipped(output: str, _: Path) -> str | None:
    """Return a complaint unless all tests ran, because a skipped test does not check anything."""
    found = re.search(r"\d+ (skipped|deselected).*", output)
    passed = re.search(r"(\d+) passed", output)
    if passed is None or (found is not None and "skipped" in found[0]):
        return f"not all tests ran: {output.strip().splitlines()[-1]}"
    return None


def replayed(run: str) -> Judge:
    """Return a check that a run replayed all rows and that engine and trainer agree."""

    def judge(_: str, folder: Path) -> str | None:
        rows = retrace.open_run(folder / "store" / run).metrics().to_pylist()
        coverage = min(row["replay/coverage"] for row in rows)
        agreement = min(row["replay/agreement"] for row in rows)
        kl = sum(row["mismatch/kl"] for row in rows) / len(rows)
        missed = coverage < FULL or agreement < LEAST_AGREEMENT or not kl < MOST_KL
        found = f"coverage {coverage:.3f}, agreement {agreement:.3f}, KL {kl:.1e}"
        return found if missed else None

    return judge


def same_bits(run: str) -> Judge:
    """Return a check that a replayed pass gives exactly the results of the recorded pass.

    Both passes use the same weights. The run uses the loss of gpu_loss.py.
    """

    def judge(_: str, folder: Path) -> str | None:
        rows = retrace.open_run(folder / "store" / run).metrics().to_pylist()
        wrong = [
            f"step {row['step']}: {name} {row[name]}"
            for row in rows
            for name, exact in (("policy_loss/changed", 0.0), ("replay/agreement", FULL))
            if row[name] != exact
        ]
        return "; ".join(wrong) or None

    return judge


def run_words(folder: Path, name: str, *settings: str) -> tuple[str, ...]:
    """Return the arguments of `retrace run` for the example.

    Args:
        folder: The report's folder, in which the run is stored.
        name: Name of the run.
        settings: Further settings.
    """
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
    """Return the settings for a run that replays the routes recorded by the quickstart.

    All GPUs belong to the trainer.

    Args:
        folder: The report's folder.
        ranks: Number of training ranks.
        settings: Further settings.
    """
    return (
        f"{ACTOR}.router_replay.replay_file={folder}/set",
        "data.val_files=null",
        f"trainer.n_gpus_per_node={ranks}",
        "trainer.total_training_steps=2",
        *settings,
    )


def tests(*nodes: str) -> tuple[str, ...]:
    """Return the arguments of pytest for some tests."""
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", *nodes)


SHARED = ("actor_rollout_ref.rollout.gpu_memory_utilization=0.4",)
"""Setting for a machine whose only GPU is shared by the trainer and the engine."""
PACKED = f"{MEGATRON}.use_remove_padding"
EXACT = (f"{ACTOR}.policy_loss.loss_mode=scripts/gpu_loss.py:exact",)
"""Setting for deterministic kernels."""
ONE_UPDATE = (
    *EXACT,
    f"{ACTOR}.router_replay.mode=R2",
    f"{ACTOR}.ppo_mini_batch_size=32",
    "trainer.total_training_steps=2",
    "data.val_files=null",
)
"""Settings for one optimizer step per step, so that the update pass uses the weights with which the
log-prob pass recorded routes."""
EVERY, RESUMED = 3, 6
"""The steps between checkpoints, and the steps of the run that is killed and resumed."""
CONTINUED = "continue from the checkpoint of policy "
"""The text in the trainer's log that precedes the policy version from which training continues."""
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
"""Number of ranks and trainer settings of each layout in which R3 is tested, keyed by name."""
EXACT_LAYOUTS = ("tp2", "ep2", "cp2")
"""The layouts in which R2 is also tested. The engine records the samples on its own GPU."""


def megatron(settings: Sequence[str]) -> list[str]:
    """Return a layout's trainer settings with their full keys."""
    return [f"{MEGATRON}.{setting}" for setting in settings]


def plan(folder: Path) -> list[Step]:
    """Return all steps in order."""
    replayed_all = (
        f"exit code 0, coverage 100%, agreement >= {LEAST_AGREEMENT:.0%}, KL < {MOST_KL:.0e}"
    )
    model = "tests/integration/training_model/test_round_trip.py"
    engine = "tests/integration/rollout/test_engine.py"
    same = "the log-probs of the update pass equal those of the native pass, bit for bit"
    record = (f"{ACTOR}.router_replay.record_file={folder}/set", *SHARED)
    return [
        Step("doctor", (*RETRACE, "doctor", EXAMPLE), "no line is marked as broken"),
        Step(
            "quickstart",
            run_words(folder, "quickstart", *record),
            replayed_all,
            1,
            replayed("quickstart"),
        ),
        Step(
            "routes against an independent forward",
            tests(f"{engine}::test_routes_and_logprobs_equal_an_independent_forward"),
            "the engine's routes and log-probs equal those of transformers",
            1,
            nothing_skipped,
        ),
        *(
            Step(
                f"R2: a replayed native pass, {name}",
                run_words(folder, f"r2-{name}", *SHARED, *ONE_UPDATE, f"{PACKED}={packed}"),
                same,
                1,
                same_bits(f"r2-{name}"),
            )
            for name, packed in (("packed", True), ("padded", False))
        ),
        *(
            Step(
                f"R2 in layout {name}",
                run_words(
                    folder,
                    f"r2-{name}",
                    *ONE_UPDATE,
                    f"trainer.n_gpus_per_node={LAYOUTS[name][0]}",
                    *megatron(LAYOUTS[name][1]),
                ),
                same,
                LAYOUTS[name][0] + 1,
                same_bits(f"r2-{name}"),
            )
            for name in EXACT_LAYOUTS
        ),
        *(
            Step(
                f"R3 in layout {name}",
                run_words(
                    folder,
                    f"r3-{name}",
                    *of_set(folder, ranks, *megatron(settings)),
                ),
                replayed_all,
                ranks,
                replayed(f"r3-{name}"),
            )
            for name, (ranks, settings) in LAYOUTS.items()
        ),
        Step(
            "save, kill -9, resume",
            ("scripts/gpu_hour.py", "--resume", "--out", str(folder)),
            "the run continues from its checkpoint, and no policy differs when computed again",
        ),
        Step(
            "export round trip",
            tests(f"{model}::test_export_is_bit_identical"),
            "weights exported from Megatron equal the loaded ones, bit for bit",
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
    """Kill a run after its first checkpoint, resume it until it finishes, and check its policies.

    The run is killed after it has finished a step since the checkpoint. The second start must
    continue from the checkpoint, and the policy that it computes again must equal the stored one.
    """
    often = (f"trainer.save_freq={EVERY}", f"trainer.total_training_steps={RESUMED}")
    words = run_words(folder, "resumed", *of_set(folder, 1, *EXACT, *often))
    saved, logged = kill_after_checkpoint(folder, words)
    subprocess.run((sys.executable, *words), cwd=ROOT, check=True)
    log = trainer_log(folder).read_text(errors="replace")[logged:]
    continued = re.search(rf"{CONTINUED}(\d+)", log)
    if continued is None or int(continued[1]) < saved:
        found = "policy 0" if continued is None else f"policy {continued[1]}"
        raise SystemExit(f"the second start continued from {found}, expected policy {saved}")
    rows = retrace.open_run(folder / "store/resumed").metrics().to_pylist()
    drift = sum(row["resume/policy_drift"] for row in rows)
    if drift:
        raise SystemExit(f"{drift} policies differ from those before the restart")
    subprocess.run(
        (sys.executable, *RETRACE, "traces", "verify", f"{folder}/store/resumed"), check=True
    )


def kill_after_checkpoint(folder: Path, words: Sequence[str]) -> tuple[int, int]:
    """Start a run, and kill it after it has finished a step since a checkpoint.

    Args:
        folder: The report's folder.
        words: Arguments of `python` that start the run.

    Returns:
        The checkpoint's policy version, and the length of the trainer's log.
    """
    store = retrace.open_store(str(folder / "store/resumed"))

    def saved() -> int:
        return max(restarts(store), default=0)

    def in_between() -> bool:
        return 0 < saved() < finished_steps(store) < RESUMED

    process = subprocess.Popen((sys.executable, *words), cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + LIMIT_S / 2
    while process.poll() is None and not in_between() and time.monotonic() < deadline:
        time.sleep(0.1)
    code = process.poll()
    if code is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if code is not None:
        raise SystemExit(f"the run ended with exit code {code} before it could be killed")
    if not in_between():
        raise SystemExit(
            f"when the run was killed, it had finished {finished_steps(store)} steps and its last "
            f"checkpoint was of policy {saved()}, expected a checkpoint, and some but not all of "
            f"the {RESUMED} steps after it"
        )
    return saved(), len(trainer_log(folder).read_text(errors="replace"))


def trainer_log(folder: Path) -> Path:
    """Return the trainer's log of the run that is resumed."""
    return folder / "local/resumed/logs/training-0.log"


def problem_of(step: Step) -> str | None:
    """Return the problem with a step's command or settings, or None."""
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
                return f"{node} does not exist"
        return None
    if words[0] == "-m":
        return None if importlib.util.find_spec(words[1]) else f"{words[1]} does not exist"
    return None if (ROOT / words[0]).is_file() else f"{words[0]} does not exist"


def run_guarded(
    words: Sequence[str], log: Path, devices: Sequence[str], limit_s: float
) -> int | None:
    """Run `python WORDS` on the given GPUs, then end all processes that it started.

    This includes processes that started their own sessions.

    Args:
        words: Arguments of `python`.
        log: File for the output.
        devices: GPUs that the command may use.
        limit_s: Seconds after which the command is ended.

    Returns:
        The exit code; None if the command took longer than `limit_s`.
    """
    shown = {"CUDA_VISIBLE_DEVICES": ",".join(devices), "PYTHONSAFEPATH": ""}
    with log.open("wb") as output:
        guard = start_guarded((sys.executable, *words), output, shown)
    try:
        return guard.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        guard.communicate()  # closes the pipe, so the guard kills the other processes and exits


def make(step: Step, folder: Path, devices: Sequence[str], limit_s: float) -> str:
    """Run a step and check its result.

    Args:
        step: Step to run.
        folder: The report's folder, to which the full output is written.
        devices: GPUs that the step may use.
        limit_s: Seconds after which the step is ended.

    Returns:
        The verdict for the report.
    """
    log = folder / f"{re.sub(r'[^a-z0-9]+', '-', step.name.lower())}.log"
    code = run_guarded(step.command, log, devices, limit_s)
    if code is None:
        return f"**missed**: not finished after {limit_s:.0f} s"
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
    """Return the GPUs that nvidia-smi lists, or its error."""
    try:
        done = subprocess.run(("nvidia-smi", "-L"), capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    return done.stdout + done.stderr


def report(folder: Path, gpus: int, listed: str, rows: Sequence[tuple[Step, str, float]]) -> str:
    """Return the report on the steps that have been run so far.

    Args:
        folder: The report's folder.
        gpus: Number of GPUs that the steps may use.
        listed: Output of nvidia-smi.
        rows: Steps with their verdicts and seconds.
    """
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
    """Run the steps within TOTAL_S, and write the report after each.

    Args:
        steps: Steps in order.
        folder: The report's folder.
        devices: GPUs that the steps may use.

    Returns:
        The exit code: 1 if an expectation was missed.
    """
    began, listed = time.monotonic(), listed_gpus()
    rows: list[tuple[Step, str, float]] = []
    for step in steps:
        started = time.monotonic()
        left_s = TOTAL_S - (started - began)
        if step.gpus > len(devices):
            verdict = f"not run: {len(devices)} GPUs found, {step.gpus} required"
        elif left_s <= 0:
            verdict = f"**missed**: not run: the limit of {TOTAL_S:.0f} s for all steps was reached"
        else:
            verdict = make(step, folder, devices, min(LIMIT_S, left_s))
        rows.append((step, verdict, time.monotonic() - started))
        print(f"{step.name}: {verdict}", flush=True)
        (folder / "report.md").write_text(report(folder, len(devices), listed, rows))
    print(f"report: {folder / 'report.md'}")
    return 1 if any("**missed**" in verdict for _, verdict, _ in rows) else 0


def try_plan(folder: Path) -> int:
    """Print the plan, check that each command exists, and return the exit code."""
    bad = 0
    for step in plan(folder):
        why = problem_of(step)
        bad += why is not None
        print(f"{step.name} ({step.gpus} GPUs): expected: {step.expected}")
        print(f"  python {' '.join(step.command)}" + (f"\n  WRONG: {why}" if why else ""))
    print("dry run: no step was run")
    return 1 if bad else 0


def main(arguments: argparse.Namespace) -> int:
    """Print or run the plan, and return the exit code."""
    folder: Path = arguments.out.resolve()
    os.chdir(ROOT)
    if arguments.resume:
        resume(folder)
        return 0
    if arguments.dry_run:
        return try_plan(folder)
    nothing = "no step was run"
    try:
        choose_device("cuda")
    except InputError as error:
        print(f"{nothing}: {error}", file=sys.stderr)
        return 2
    pool = gpu_pool()
    if arguments.gpus and arguments.gpus > len(pool):
        print(f"{nothing}: found {len(pool)} GPUs, --gpus is {arguments.gpus}", file=sys.stderr)
        return 2
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        print(f"{nothing}: {folder} exists; name a new folder with --out", file=sys.stderr)
        return 2
    return make_all(plan(folder), folder, pool[: arguments.gpus])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpus", type=int, choices=(1, 2, 8), help="number of GPUs; default: all")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/gpu-hour"), help="new folder for the report"
    )
    parser.add_argument("--dry-run", action="store_true", help="only print and check the plan")
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    sys.exit(main(parser.parse_args()))
