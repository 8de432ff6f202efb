"""`retrace check`: read and check everything that a run needs, and start nothing."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal

import retrace
from pipeline.cli.printable import printable
from pipeline.inputs.sizes.memory import memory_lines, parse_memory
from pipeline.store import is_remote, open_store


def run_check(path: Path, overrides: Sequence[str], gpu_memory: str | None = None) -> int:
    """Check the input of a run; the exit code of the command: 0, or 2 with the errors on stderr.

    `gpu_memory`: the size of GPUs that it must fit into, such as 80GiB.
    """
    try:
        limit = None if gpu_memory is None else parse_memory(gpu_memory)
    except retrace.InputError as error:
        print_errors(error)
        return 2
    return 2 if check(path, overrides, limit) is None else 0


def check(
    path: Path, overrides: Sequence[str], gpu_limit: int | None = None
) -> retrace.ReadyRun | None:
    """The run whose input is right; None after all errors were printed.

    Prints notes and errors, or what the run is going to be, on stderr. `gpu_limit`: the bytes of
    GPUs that it must fit into; memory is then that of GPUs also on a machine without.
    """
    console = _console()
    console.print(f"checking {path}", markup=False)  # tokenizers and prompts take a while
    if (line := _finished_line(path, overrides)) is not None:
        console.print(line, markup=False)
    try:
        ready = retrace.check(path, overrides)
        if gpu_limit is not None:
            if problems := ready.gpu_memory_problems(gpu_limit):
                raise retrace.InputError(problems, ready.notes)
            ready = replace(ready, memory=ready.gpu_memory())
    except retrace.InputError as error:
        print_errors(error)
        return None
    _print(console, "note", "yellow", ready.notes)
    but = ", but not for this machine" if ready.too_small else ""
    console.print(f"{path} is right{but}: {_model(ready)}, run {ready.uri}", markup=False)
    for name, text in summary(ready):
        console.print(f"  {name:<10}{text}", markup=False)
    _print(console, "warning", "yellow", ready.too_small)
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
    """What a run is going to do, and where it writes: names and texts."""
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
        # As before where sequences are whole.
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
            f"{batch // actor['ppo_mini_batch_size'] * actor['ppo_epochs']} a step, of "
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
    lines += memory_lines(ready.memory)
    return lines


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def writes_line(writes: retrace.Writes) -> str:
    """How much a run writes into its store, for people."""
    routes = f", routes up to {decimal(writes.routes)}" if writes.routes else ""
    when = "every step"
    if writes.save_freq > 1:
        when = f"every {writes.save_freq} steps and at the end"
    return (
        f"per step a policy of {decimal(writes.policy)}, samples up to "
        f"{decimal(writes.samples)}{routes}; {when} "
        f"a checkpoint of about {decimal(writes.checkpoint)}"
    )


def _finished_line(path: Path, overrides: Sequence[str]) -> str | None:
    """What to say of a run that is finished, before its inputs are checked, which takes seconds."""
    # Imported here: they take a second, in which the first line should stand already.
    from pipeline.config.reading.load import load_config
    from pipeline.report.outcome import finished_line

    try:
        config = load_config(path, overrides).config
        # A server that does not answer is waited for by the check alone.
        return None if is_remote(config.store.uri) else finished_line(open_store(config.run_uri))
    except (retrace.InputError, retrace.StoreError):
        return None  # the check says what is wrong


def print_errors(error: retrace.InputError) -> None:
    """Notes, then every problem as a line of its own, then what was not checked, on stderr."""
    console = _console()
    _print(console, "note", "yellow", error.notes)
    _print(console, "error", "red", error.problems)
    for line in getattr(error, "__notes__", ()):
        console.print(line, markup=False)


def _console() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def _print(console: Console, label: str, colour: str, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(f"[{colour}]{label}:[/{colour}]", end=" ")
        console.print(printable(line, keep="\n\t"), markup=False, emoji=False)
