"""`retrace check`: read and check everything that a run needs, without starting anything."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal

import retrace
from pipeline.cli.printable import printable_message
from pipeline.inputs.sizes.memory import Memory, memory_lines, parse_memory
from pipeline.inputs.writes import Writes
from pipeline.store import is_remote, open_store

Config = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="Settings of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Settings that replace those in the file."),
]


def check(
    config: Config,
    overrides: Overrides = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Refuse a run that is estimated not to fit on GPUs of this size, such as 80GiB.",
        ),
    ] = None,
) -> None:
    """Check CONFIG.yaml and everything that it names, without starting anything.

    The command checks settings, model, prompts, reward function and store, and prints all errors.
    It also estimates the memory that the run needs (docs/sizes.md).
    """
    try:
        limit = None if gpu_memory is None else parse_memory(gpu_memory)
    except retrace.InputError as error:
        print_errors(error)
        raise typer.Exit(2) from error
    if checked(config, overrides or [], limit) is None:
        raise typer.Exit(2)


def checked(
    path: Path, overrides: Sequence[str], gpu_limit: int | None = None
) -> retrace.ReadyRun | None:
    """Check a run, and return it; return None if it has errors.

    All errors, notes and the summary of the run are printed on stderr.

    Args:
        path: The settings file.
        overrides: Settings that replace those in the file, as key.path=value.
        gpu_limit: The memory of the GPUs on which the run must fit, in bytes. If it is set, the
            memory estimate is for GPUs, even on a machine without GPUs.
    """
    console = error_console()
    console.print(f"checking {path}", markup=False)  # checking tokenizers and prompts takes a while
    if (line := _finished_line(path, overrides)) is not None:
        console.print(line, markup=False)
    failed: retrace.InputError | None = None
    try:
        ready = retrace.check(path, overrides)
    except retrace.InputError as error:
        failed = error
    verdict = None if gpu_limit is None else _verdict(path, overrides, gpu_limit)
    if verdict is not None and verdict[1]:
        failed = failed or retrace.InputError((), ready.notes)
    if failed is not None:
        print_errors(failed, () if verdict is None else verdict[1])
        if verdict is not None:
            _print_lines(console, memory_lines(verdict[0]))
        return None
    if verdict is not None:
        ready = replace(ready, memory=verdict[0])
    print_labelled(console, "note", "yellow", ready.notes)
    but = ", but not for this machine" if ready.too_small else ""
    console.print(f"{path} is valid{but}: {_model(ready)}, run {ready.uri}", markup=False)
    _print_lines(console, summary(ready))
    print_labelled(console, "warning", "yellow", ready.too_small)
    if ready.too_small:
        console.print("`retrace run` refuses it on this machine", markup=False)
    return ready


def _model(ready: retrace.ReadyRun) -> str:
    routing = "dense"
    if (geometry := ready.geometry) is not None:
        routing = (
            f"{len(geometry.layers)} MoE layers, top-{geometry.topk} of {geometry.experts} experts"
        )
    mode = ready.settings["actor_rollout_ref"]["actor"]["router_replay"]["mode"]
    return f"{ready.prompts} prompts, {routing}, routing replay {mode}"


def summary(ready: retrace.ReadyRun) -> list[tuple[str, str]]:
    """Return the summary of a run (work, resources, locations) as pairs of name and text."""
    trainer, data = ready.settings["trainer"], ready.settings["data"]
    actor = ready.settings["actor_rollout_ref"]["actor"]
    rollout = ready.settings["actor_rollout_ref"]["rollout"]
    launch, megatron = ready.settings["launch"], actor["megatron"]
    batch, steps = data["train_batch_size"], trainer["total_training_steps"]
    workers = launch["rollout_workers"]
    if workers is None:
        workers = 1 if actor["router_replay"]["replay_file"] is None else 0
    sizes = {
        "TP": megatron["tensor_model_parallel_size"],
        "PP": megatron["pipeline_model_parallel_size"],
        # CP is shown only if sequences are split, so that the lines of other runs do not change.
        "CP": context if (context := megatron["context_parallel_size"]) > 1 else None,
        "VPP": megatron["virtual_pipeline_model_parallel_size"],
        "EP": megatron["expert_model_parallel_size"],
        "expert-TP": megatron["expert_tensor_parallel_size"],
    }
    ranks = trainer["nnodes"] * trainer["n_gpus_per_node"]
    engine = f"TP{rollout['tensor_model_parallel_size']}, {rollout['dtype']}"
    layout = " ".join(f"{name}{size}" for name, size in sizes.items() if size is not None)
    replicas = ranks // (sizes["TP"] * sizes["PP"] * context)
    lines = [
        (
            "steps",
            f"{steps} of {batch} prompts x {rollout['n']} = {batch * rollout['n']} samples",
        ),
        (
            "updates",
            f"{batch // actor['ppo_mini_batch_size'] * actor['ppo_epochs']} per step, each of "
            f"{actor['ppo_mini_batch_size']} prompts",
        ),
        (
            "training",
            f"{_count(ranks, 'rank')}: {layout}, data-parallel {replicas}, {megatron['dtype']}",
        ),
        ("rollout", f"{_count(workers, 'worker')} of {engine}"),
        ("machine", ready.machine),
        ("store", ready.uri),
        ("logs", f"{ready.local_folder / 'logs'}"),
    ]
    if "tensorboard" in trainer["logger"]:
        lines.append(("curves", f"{ready.local_folder / 'tensorboard'}"))
    if ready.val_prompts:
        lines.insert(2, ("val", f"{ready.val_prompts} prompts"))
    if ready.writes is not None:
        lines.append(("writes", writes_line(ready.writes)))
        if copies := copies_line(ready.writes, ready.settings["store"]["policy_cache"]):
            lines.append(("copies", copies))
    lines += memory_lines(ready.memory)
    return lines


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def writes_line(writes: Writes) -> str:
    """Return a text with the sizes of the data that a run writes into its store."""
    routes = f", routes up to {decimal(writes.routes)}" if writes.routes else ""
    when = "every step"
    if writes.save_freq > 1:
        when = f"every {writes.save_freq} steps and at the end"
    policy = decimal(writes.policy)
    if writes.whole_every is not None and writes.whole_every > 1:
        policy += (
            f" (whole every {writes.whole_every} steps, otherwise a difference of at most "
            f"{decimal(writes.policy // 2)})"
        )
    return (
        f"per step, a policy of {policy} and samples of up to "
        f"{decimal(writes.samples)}{routes}; {when} "
        f"a checkpoint of about {decimal(writes.checkpoint)}"
    )


def copies_line(writes: Writes, cache: str) -> str:
    """Return a text with the sizes of the policy copies that workers keep on their machines."""
    lines = []
    if writes.rank_copies:
        lines.append(f"training ranks keep {decimal(writes.rank_copies)} under TMPDIR")
    if writes.engine_copies:
        place = {"disk": "under TMPDIR", "memory": "in /dev/shm"}.get(cache, f"in {cache}")
        lines.append(
            f"the rollout workers on a machine keep {decimal(writes.engine_copies)} {place}"
        )
    return ", ".join(lines)


def _finished_line(path: Path, overrides: Sequence[str]) -> str | None:
    """Return a line about a run that is already finished; None if it is not finished.

    The line can be printed before the slow check of the inputs.
    """
    # Imported here because these imports take a second, which would delay the first line.
    from pipeline.config.reading.load import load_config
    from pipeline.report.outcome import finished_line

    try:
        config = load_config(path, overrides).config
        # A remote store is skipped, because its server may not answer.
        return None if is_remote(config.store.uri) else finished_line(open_store(config.run_uri))
    except (retrace.InputError, retrace.StoreError):
        return None  # the check reports the problem


def _verdict(path: Path, overrides: Sequence[str], limit: int) -> tuple[Memory, list[str]] | None:
    """Return the memory estimate for GPUs and its problems; None if the settings are invalid.

    Other checks, which fail if only config.json is present, do not affect the verdict.
    """
    from pipeline.config.reading.load import load_config
    from pipeline.inputs.sizes.verdict import gpu_verdict

    try:
        return gpu_verdict(load_config(path, overrides).config, limit)
    except retrace.InputError:
        return None  # the check reports the problem


def print_errors(error: retrace.InputError, more: Sequence[str] = ()) -> None:
    """Print notes, problems and the skipped checks on stderr, each on its own line.

    `more` contains problems that were found independently of the error.
    """
    console = error_console()
    print_labelled(console, "note", "yellow", error.notes)
    print_labelled(console, "error", "red", (*error.problems, *more))
    for line in getattr(error, "__notes__", ()):
        console.print(line, markup=False)


def error_console() -> Console:
    """Return the console for everything that is not the result of a command."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def _print_lines(console: Console, lines: Sequence[tuple[str, str]]) -> None:
    for name, text in lines:
        console.print(f"  {name:<10}{text}", markup=False)


def print_labelled(console: Console, label: str, colour: str, lines: Sequence[str]) -> None:
    """Print each line after a coloured label."""
    for line in lines:
        console.print(f"[{colour}]{label}:[/{colour}]", end=" ")
        console.print(printable_message(line, keep="\n\t"), markup=False, emoji=False)
