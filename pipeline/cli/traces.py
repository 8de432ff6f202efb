"""`retrace traces`: show, check, export and clean up the traces of a run or recorded set."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from pipeline.cli import upkeep
from pipeline.cli.epilog import LOOKED, LOOKED_AT_STEPS, command_group, epilog
from pipeline.cli.printable import printable_message
from pipeline.cli.runs import (
    DAMAGED,
    Run,
    Wide,
    for_steps,
    open_run,
    print_,
    print_table,
    refusing,
)
from pipeline.cli.trace_tables import (
    LESS_NEEDED,
    STATS_NOTE,
    answers_table,
    sample_lines,
    sample_table,
    samples_table,
    seen,
    stats_line,
    stats_table,
    steps_table,
)
from pipeline.run import keys
from pipeline.store import Store
from pipeline.traces import TraceError, used_routes
from pipeline.traces.format.ids import VALIDATION
from pipeline.traces.format.manifest import (
    Manifest,
    is_pruned,
    open_manifest,
    read_manifest,
    refuse_pruned,
    sealed_steps,
)
from pipeline.upkeep.export import export, export_for
from pipeline.upkeep.lost_commits import lost_manifests
from pipeline.upkeep.stats import step_stats
from pipeline.upkeep.verify import verify
from retrace import SealedStep

_PAGE = "docs/trace-format.md, docs/library.md (the same in Python)"
_RUN = "outputs/store/quickstart"

app = command_group(
    "List, show, check, measure and export traces, or remove old ones.",
    epilog(
        _PAGE,
        LOOKED_AT_STEPS,
        f"retrace traces ls {_RUN}",
        f"retrace traces show {_RUN} 000000/1261/0",
    ),
)
app.command(
    "sweep",
    epilog=epilog(
        "docs/store.md",
        "0: done; 1: files that a damaged commit may name were kept; 2: no run was found",
        f"retrace traces sweep {_RUN} --dry-run",
        f"retrace traces sweep {_RUN} --older-than 12h",
    ),
)(upkeep.sweep_)
app.command(
    "prune",
    epilog=epilog(
        "docs/store.md",
        "0: done; 2: no run was found, or a restart needs the data, and nothing was removed",
        f"retrace traces prune {_RUN} --keep-steps 20 --dry-run",
    ),
)(upkeep.prune_)

_Step = Annotated[int | None, typer.Option("--step", min=0, metavar="N", help="Only this step.")]

_Form = Literal["npy", "pt", "verl", "slime"]

_SAMPLE_ID = re.compile(r"(?:val-)?[0-9]{6}/[^/]+/[0-9]+(?:\.[0-9]+)?")
_Validation = Annotated[
    int | None,
    typer.Option("--validation", min=0, metavar="V", help="The answers of policy V's validation."),
]


@app.command(
    "ls",
    epilog=epilog(
        _PAGE,
        LOOKED_AT_STEPS,
        f"retrace traces ls {_RUN}",
        f"retrace traces ls {_RUN} --step 3",
        f"retrace traces ls {_RUN} --validation 8",
    ),
)
def list_(run: Run, step: _Step = None, validation: _Validation = None, wide: Wide = False) -> None:
    """List the sealed steps, or the samples of one step or validation."""
    with refusing():
        opened = open_run(run, sealed=validation is None)
        if validation is not None:
            answers = opened.validation(validation).samples
            print_table(answers_table(validation, answers), wide, LESS_NEEDED)
        elif step is None:
            found: list[SealedStep] = []

            def find(number: int) -> None:
                one = opened.step(number)
                if one.awaits_routes and opened.store.size(keys.metrics(number)) is not None:
                    used_routes(opened.store, number)  # it names what a trained step lacks
                found.append(one)

            damaged = for_steps(*_with_lost(opened.store, find))
            print_table(steps_table(opened.uri, found), wide, LESS_NEEDED)
            if damaged:
                raise typer.Exit(DAMAGED)
        else:
            pruned = is_pruned(opened.store, step)
            print_table(samples_table(_manifest(opened.store, step), pruned), wide, LESS_NEEDED)


@app.command(
    epilog=epilog(
        _PAGE,
        LOOKED,
        f"retrace traces show {_RUN} 000000/1261/0",
        f"retrace traces show {_RUN} 000000/1261/0 --layer 0 --layer 3",
        f"retrace traces show {_RUN} val-000008/17/0",
    )
)
def show(
    run: Run,
    sample: Annotated[str, typer.Argument(help="A sample's id, such as 000003/17/2.")],
    step: _Step = None,
    layer: Annotated[
        list[int] | None,
        typer.Option(
            "--layer", metavar="N", help="Only this MoE layer (repeat the option for more)."
        ),
    ] = None,
    wide: Wide = False,
) -> None:
    """Show a sample: reward, texts, and its tokens with the experts chosen for each.

    A terminal shows the first layers that fit; --layer selects others.
    """
    with refusing():
        if _SAMPLE_ID.fullmatch(run) and not _SAMPLE_ID.fullmatch(sample):
            raise TraceError(f"RUN {run!r} is a sample id; give RUN first: show {sample} {run}")
        named = _step_of(sample)
        if sample.startswith(VALIDATION):
            answer = open_run(run, sealed=False).validation(named).sample(sample)
            for line in sample_lines(answer, None):
                print_(line)
            print_table(sample_table(answer, ()), wide, LESS_NEEDED)
            return
        number = named if step is None else step
        found = open_run(run).step(number)
        if sample not in found.manifest.numbers:
            raise TraceError(
                f"sample {sample}: not in step {number}; "
                f"list the ids with: retrace traces ls {run} --step {number}"
            )
        geometry = found.manifest.geometry
        layers = () if geometry is None else layer or geometry.layers
        one = found.sample(sample, layers)
        [not_trained] = found.manifest.select([sample])["not_trained"].to_pylist()
        for line in sample_lines(one, not_trained):
            print_(line)
        headers = [f"layer {layer}" for layer in reversed(layers)]
        print_table(sample_table(one, layers), wide, headers)


@app.command(
    "verify",
    epilog=epilog(
        "docs/trace-format.md",
        "0: no problems; 1: problems, one line each; 2: no run was found",
        f"retrace traces verify {_RUN}",
        f"retrace traces verify {_RUN} --step 3",
    ),
)
def verify_(run: Run, step: _Step = None) -> None:
    """Check every digest, length and id, and that related objects match.

    Without --step, the staged inputs, policies, checkpoints and validations of a run are checked
    as well. A note names a check that an older format does not allow; it is not a problem.
    """
    with refusing():
        store = open_run(run, sealed=False).store
        if step is not None and store.size(keys.metrics(step)) is None:
            _known(store, step)  # for a trained step, `verify` reports the missing manifest
        report = verify(store, step)
        for problem in report.problems:
            print_(printable_message(str(problem)))
        if report.problems:
            print_(f"problems: {len(report.problems)}; {seen(report)}")
            raise typer.Exit(1)
        print_(f"all good; {seen(report)}")


@app.command(
    epilog=epilog("docs/replay.md", LOOKED_AT_STEPS, f"retrace traces stats {_RUN} --step 0")
)
def stats(run: Run, step: _Step = None, wide: Wide = False) -> None:
    """Show the expert load and agreement in each layer, the valid rows, and the size of routes."""
    with refusing():
        store = open_run(run).store

        def show_step(number: int) -> None:
            if _has_routes(store, number):
                found = step_stats(store, number)
                print_(stats_line(found))
                print_table(stats_table(found), wide, LESS_NEEDED)

        damaged = _in_steps(store, step, show_step)
        for line in STATS_NOTE:
            print_(line)
    if damaged:
        raise typer.Exit(DAMAGED)


@app.command(
    "export",
    epilog=epilog(
        "docs/trace-format.md",
        LOOKED_AT_STEPS,
        f"retrace traces export {_RUN} --out routes",
        f"retrace traces export {_RUN} --out verl --format verl --step 3",
    ),
)
def export_(
    run: Run,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder to write to.")],
    form: Annotated[
        _Form,
        typer.Option("--format", help="npy, pt: one file per sample; verl, slime: one per step."),
    ] = "npy",
    step: _Step = None,
    num_layers: Annotated[
        int | None,
        typer.Option(
            "--num-layers",
            min=1,
            metavar="N",
            help="For verl and slime: number of decoder layers, if the last ones are dense.",
        ),
    ] = None,
) -> None:
    """Write the routes as arrays [T, L, K]; docs/trace-format.md describes the files."""
    out = out.expanduser()
    with refusing():
        store = open_run(run).store
        if step is not None:
            _known(store, step)
        if out.is_dir() and any(out.iterdir()):
            raise TraceError(f"--out {out}: the folder is not empty; give a new or an empty one")
        if num_layers is not None and form in ("npy", "pt"):
            raise TraceError(f"--num-layers applies to --format verl or slime, not to {form}")

        def export_step(number: int) -> None:
            if step is None and not _has_routes(store, number):
                return
            refuse_pruned(store, number)
            print_(f"step {number}: {_exported(store, number, out, form, num_layers)}")

        damaged = _in_steps(store, step, export_step)
    if damaged:
        raise typer.Exit(DAMAGED)


def _exported(store: Store, step: int, out: Path, form: _Form, num_layers: int | None) -> str:
    """Export a step, and return a text that describes the written file or folder."""
    if form == "verl" or form == "slime":
        made = export_for(store, step, out, form, num_layers)
        notes = [f"{made.samples} samples in {out / f'{step}.pt'}"]
        if made.untrained:
            notes.append(
                f"{made.untrained} of them are excluded from the loss: unknown rows or no reward"
            )
        if made.left_out:
            why = "no response" if form == "verl" else "one token"
            notes.append(f"{made.left_out} left out, because they have {why}, which {form} rejects")
        if made.not_counted:
            notes.append(
                f"{made.not_counted} left out, because their rewards do not count in their groups "
                "(greedy baselines)"
            )
        if made.without_logprobs:
            notes.append(
                "no log-probs, because they are unknown for tokens in the loss (samples: "
                f"{made.without_logprobs})"
            )
        return "; ".join(notes)
    folder = out / f"{step:06d}"
    return f"{export(store, step, folder, form)} samples in {folder}"


def _has_routes(store: Store, step: int) -> bool:
    """Return whether a sealed step has routes; if not, print the reason."""
    reason = None
    if is_pruned(store, step):
        reason = "pruned, its routes were removed"
    elif open_manifest(store, step).head.training and not (
        store.size(keys.trainer_routes(step)) or store.size(keys.metrics(step))
    ):
        reason = "not trained yet, its routes are not recorded"
    if reason is not None:
        print_(f"step {step}: {reason}")
    return reason is None


def _known(store: Store, step: int) -> int:
    steps = sealed_steps(store)
    if step not in steps:
        raise TraceError(f"{store.uri}: step {step} is not sealed; sealed steps: {steps}")
    return step


def _in_steps(store: Store, step: int | None, work: Callable[[int], None]) -> bool:
    """Call `work` for one step or all steps, and return whether any step was unreadable.

    If there is only one step, its error is raised instead.
    """
    steps, each = _with_lost(store, work) if step is None else ([_known(store, step)], work)
    if len(steps) > 1:
        return for_steps(steps, each)
    for number in steps:
        each(number)
    return False


def _with_lost(
    store: Store, work: Callable[[int], None]
) -> tuple[list[int], Callable[[int], None]]:
    """Return the numbers of all sealed steps, and a function that calls `work` for one of them.

    The numbers include steps that have lost their manifest, for which the function raises a
    TraceError instead. They do not include steps that are still being written.
    """
    lost = lost_manifests(store, [info.key for info in store.list(keys.steps())])

    def each(step: int) -> None:
        if step in lost:
            raise TraceError(f"{keys.manifest(step)}: {lost[step]}; restore the object")
        work(step)

    return sorted({*sealed_steps(store), *lost}), each


def _manifest(store: Store, step: int) -> Manifest:
    return read_manifest(store, _known(store, step))


def _step_of(sample: str) -> int:
    if not _SAMPLE_ID.fullmatch(sample):
        raise TraceError(
            f"SAMPLE {sample!r}: not a sample id; expected STEP/PROMPT/NUMBER, such as "
            "000003/17/2; list the ids with: retrace traces ls RUN --step N"
        )
    return int(sample.removeprefix(VALIDATION).split("/")[0])
