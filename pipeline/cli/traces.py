"""`retrace traces`: look at the traces of a run or a record set, and check them."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pipeline.cli.tokens import token_texts
from pipeline.store import Store, StoreError, keys, open_store
from pipeline.traces import Routes, Sample, TraceError, read_routes, read_samples
from pipeline.traces.export import Format, export
from pipeline.traces.manifest import Manifest, read_manifest, sealed_steps
from pipeline.traces.problems import Report
from pipeline.traces.stats import StepStats, step_stats
from pipeline.traces.training import used_routes
from pipeline.traces.verify import verify

app = typer.Typer(
    help="List, show, check, measure and export traces.", no_args_is_help=True, add_completion=False
)

_Run = Annotated[str, typer.Argument(metavar="RUN", help="Folder or URI of a run or a record set.")]
_Step = Annotated[int | None, typer.Option("--step", min=0, help="This step only.")]

_RUN_OBJECT = re.compile(r"[^/]+/(run\.json|steps/\d{6}/manifest\.json)")

_SAMPLE_ID = re.compile(r"\d{6}/\d+(\.\d+)?/\d+")
_INPUT = 2  # exit code: what was asked for is not there


@app.command("ls")
def list_(run: _Run, step: _Step = None) -> None:
    """List the sealed steps, or the samples of one."""
    with _refusing():
        store = _open(run)
        if step is None:
            _print(_steps_table(store))
        else:
            _print(_samples_table(_manifest(store, step)))


@app.command()
def show(
    run: _Run,
    sample: Annotated[str, typer.Argument(help="A sample's id, such as 000003/17/2.")],
    step: _Step = None,
    layer: Annotated[
        list[int] | None, typer.Option("--layer", help="This MoE layer only (repeat for more).")
    ] = None,
) -> None:
    """Show a sample's tokens with the experts that were chosen for each."""
    with _refusing():
        if _SAMPLE_ID.fullmatch(run) and not _SAMPLE_ID.fullmatch(sample):
            raise TraceError(f"RUN {run!r} is a sample's id; give RUN first: show {sample} {run}")
        named = _step_of(sample)
        number = named if step is None else step
        store = _open(run)
        manifest = _manifest(store, number)
        if sample not in manifest.numbers:
            raise TraceError(
                f"sample {sample}: not in step {number}; "
                f"list the ids with: retrace traces ls {run} --step {number}"
            )
        found = read_samples(store, manifest, [sample])[0]
        used = used_routes(store, manifest.step)
        layers: Sequence[int] = ()
        routes = None
        if used.geometry is not None:
            layers = layer or used.geometry.layers
            routes = read_routes(store, used, [sample], layer)[sample]
        _print(_sample_table(store, found, routes, layers))


@app.command("verify")
def verify_(run: _Run, step: _Step = None) -> None:
    """Check every digest, length, id and join. Exit code 1: something is wrong.

    Of a run also the staged inputs, policies, checkpoints and validations; with --step that step
    only.
    """
    with _refusing():
        store = _open(run, sealed=False)
        if step is not None and store.size(keys.metrics(step)) is None:
            _known(store, step)  # a step that was trained must be sealed: that is checked
        report = verify(store, step)
    for problem in report.problems:
        _print(str(problem))
    if report.problems:
        _print(f"problems: {len(report.problems)}; {_seen(report)}")
        raise typer.Exit(1)
    _print(f"all good; {_seen(report)}")


@app.command()
def stats(run: _Run, step: _Step = None) -> None:
    """Expert load and agreement by layer, valid rows, bytes."""
    with _refusing():
        store = _open(run)
        for number in _chosen(store, step):
            found = step_stats(store, number)
            _print(_stats_line(found))
            _print(_stats_table(found))
    _print(_STATS_NOTE)


@app.command("export")
def export_(
    run: _Run,
    out: Annotated[Path, typer.Option("--out", help="Folder to write to.")],
    form: Annotated[Format, typer.Option("--format", help="npy or pt.")] = "npy",
    step: _Step = None,
) -> None:
    """Write each sample's routes as an array [T, L, K], with samples.json beside them."""
    with _refusing():
        store = _open(run)
        steps = _chosen(store, step)
        if out.is_dir() and any(out.iterdir()):
            raise TraceError(f"--out {out}: the folder is not empty; give a new or an empty one")
        for number in steps:
            folder = out / f"{number:06d}"
            _print(f"step {number}: {export(store, number, folder, form)} samples in {folder}")


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn what a store or trace lacks into one line and exit code 2."""
    try:
        yield
    except (StoreError, TraceError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(_INPUT) from error


def _open(run: str, sealed: bool = True) -> Store:
    """The store of a run or record set; `sealed`: with a step to look at."""
    store = open_store(run)
    if sealed_steps(store) or (not sealed and store.size(keys.run_json()) is not None):
        return store
    if store.size(keys.run_json()) is not None:
        raise TraceError(f"{run}: no step of this run is sealed yet")
    runs = sorted(
        {info.key.split("/")[0] for info in store.list("") if _RUN_OBJECT.fullmatch(info.key)}
    )
    if runs:
        base = run.rstrip("/")
        raise TraceError(
            f"{run}: a store of {len(runs)} runs; give one of them: "
            + ", ".join(f"{base}/{name}" for name in runs)
        )
    raise TraceError(
        f"{run}: no sealed step there; give the folder or URI of a run "
        "(such as outputs/store/quickstart) or of a record set"
    )


def _known(store: Store, step: int) -> int:
    steps = sealed_steps(store)
    if step not in steps:
        raise TraceError(f"{store.uri}: step {step} is not sealed; sealed steps: {steps}")
    return step


def _chosen(store: Store, step: int | None) -> list[int]:
    return sealed_steps(store) if step is None else [_known(store, step)]


def _manifest(store: Store, step: int) -> Manifest:
    return read_manifest(store, _known(store, step))


def _step_of(sample: str) -> int:
    if not _SAMPLE_ID.fullmatch(sample):
        raise TraceError(
            f"SAMPLE {sample!r}: not an id; an id is STEP/PROMPT/NUMBER, such as 000003/17/2; "
            "list them with: retrace traces ls RUN --step N"
        )
    return int(sample.split("/")[0])


def _print(what: Any) -> None:
    # Cut to the terminal a table would hide experts; a pipe has no width to keep to.
    console = Console()
    if not console.is_terminal:
        console = Console(width=1_000)
    console.print(what, markup=False, highlight=False, soft_wrap=isinstance(what, str))


def _share(part: int | None, whole: int) -> str:
    return "—" if part is None or not whole else f"{part / whole:.1%}"


def _number(value: float | None, form: str) -> str:
    return "—" if value is None else format(value, form)


def _table(title: str | None, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in _TEXTS else "right", overflow="fold")
    return table


_TEXTS = {"kind", "engine", "id", "text"}


def _steps_table(store: Store) -> Table:
    table = _table(
        store.uri, "step", "policy", "kind", "engine", "samples", "tokens", "valid rows", "reward"
    )
    for step in sealed_steps(store):
        manifest = used_routes(store, step)
        made = manifest.provenance
        rewards = [reward for reward in manifest.rows["reward"].to_pylist() if reward is not None]
        table.add_row(
            str(step),
            ", ".join(map(str, manifest.policy_versions)),
            made.kind if made else "—",
            made.engine if made else "—",
            str(len(manifest.ids)),
            str(sum(manifest.rows["rows_total"].to_pylist()) + len(manifest.ids)),
            _valid_share(manifest),
            _number(sum(rewards) / len(rewards) if rewards else None, ".3f"),
        )
    return table


def _valid_share(manifest: Manifest) -> str:
    """Of routes that the trainer recorded only `stats`, which reads them, knows it."""
    columns = manifest.rows.select(["rows_valid", "rows_total"]).to_pydict()
    if None in columns["rows_valid"]:
        return "—"
    return _share(sum(columns["rows_valid"]), sum(columns["rows_total"]))


def _samples_table(manifest: Manifest) -> Table:
    title = f"step {manifest.step}"
    table = _table(title, "id", "prompt", "response", "valid rows", "reward")
    for row in manifest.rows.to_pylist():
        table.add_row(
            row["id"],
            str(row["prompt_length"]),
            str(row["response_length"]),
            _share(row["rows_valid"], row["rows_total"]),
            row["reward_error"] or _number(row["reward"], ".3f"),
        )
    return table


def _sample_table(
    store: Store, sample: Sample, routes: Routes | None, layers: Sequence[int]
) -> Table:
    P = len(sample.prompt_tokens_P)
    title = (
        f"{sample.id}: {P} prompt and {len(sample.response_tokens_G)} response tokens, "
        f"reward {_number(sample.reward, '.3f')}, finished by {sample.finish_reason}"
    )
    table = _table(title, "position", "token", "text", "log-prob", *(f"layer {i}" for i in layers))
    tokens = sample.tokens_S.tolist()
    for t, (token, text) in enumerate(zip(tokens, token_texts(store, tokens), strict=True)):
        logprob = None if t < P else float(sample.logprobs_G[t - P])
        experts = ["" for _ in layers]  # the last token was never fed to the model
        if routes is not None and t < len(routes.valid_T):
            experts = ["not known" for _ in layers]
            if routes.valid_T[t]:
                experts = [" ".join(map(str, sets_K)) for sets_K in routes.sets_TLK[t].tolist()]
        table.add_row(str(t), str(token), text, _number(logprob, ".3f"), *experts)
    return table


_STATS_NOTE = (
    "load: an expert's share of the layer's choices; max / mean and entropy: 1 is even; "
    "R3 = R2: rows for which engine and trainer recorded the same experts; in training: rows for "
    "which the trainer's own choice was the replayed one; all: the extremes of the loads, the mean "
    "of the rest\n"
    "bytes per token and layer are far below the format's 2 where the samples of a group share "
    "their prompt, whose routes are stored once, experts are few, or the same sets come often"
)


def _stats_line(stats: StepStats) -> str:
    return (
        f"step {stats.step}, {stats.kind}: {stats.samples} samples, valid rows "
        f"{_share(stats.rows_valid, stats.rows_total)} of {stats.rows_total}, "
        f"{stats.bytes_per_token_layer:.2f} bytes per token and layer"
    )


def _stats_table(stats: StepStats) -> Table:
    names = ("layer", "load min", "load max", "max / mean", "entropy", "R3 = R2", "in training")
    table = _table(None, *names)
    for layer in (*stats.layers, stats.total):
        if layer.layer is None:
            table.add_section()
        table.add_row(
            "all" if layer.layer is None else str(layer.layer),
            f"{layer.load_min:.2%}",
            f"{layer.load_max:.2%}",
            f"{layer.load_max_over_mean:.2f}",
            f"{layer.load_entropy:.3f}",
            _number(layer.agreement, ".2%"),
            _number(layer.agreement_in_training, ".2%"),
        )
    return table


def _seen(report: Report) -> str:
    """What was checked; kinds of which there is nothing are left out."""
    counts = {
        "samples": report.samples,
        "inputs": report.inputs,
        "policies": report.policies,
        "checkpoints": report.checkpoints,
        "validation shards": report.validations,
        "files": report.files,
        "bytes": report.size,
    }
    some = [f"{n:,} {name}" for name, n in counts.items() if n]
    return ", ".join([f"checked: {report.steps:,} sealed steps", *some])
