"""Export of routes as plain arrays, for other tools and other trainers."""

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from pipeline.store import Store
from pipeline.traces.format.ids import file_name
from pipeline.traces.format.manifest import BASELINE, Manifest
from pipeline.traces.format.types import Routes, Sample, TraceError
from pipeline.traces.read.peers import slime_sample, unknown_logprobs, verl_sample
from pipeline.traces.read.reader import read_routes, read_samples
from pipeline.traces.read.trainer import used_routes

Format = Literal["npy", "pt"]
"""Formats with one file per sample."""
Peer = Literal["verl", "slime"]
"""Trainers for which a step is exported as one file."""
_LOGPROBS = "rollout_log_probs"
"""The name that both trainers use for the log-probs field."""


@dataclass(frozen=True)
class ForPeer:
    """The sample counts of a file that is exported for a trainer."""

    samples: int
    """Number of samples in the file."""
    untrained: int
    """Number of samples in the file that are excluded from the loss, because they have unknown
    rows or no reward."""
    left_out: int
    """Number of the step's samples that are not in the file because the trainer would reject
    them."""
    not_counted: int
    """Number of the step's samples that are not in the file because their rewards are not among
    their groups' rewards; for example, greedy baselines."""
    without_logprobs: int
    """Number of trained samples with unknown log-probs. If there are any, the log-probs field is
    omitted from all samples."""


def export(store: Store, step: int, folder: Path, form: Format) -> int:
    """Write a step's routes to a folder, with samples.json as an index.

    In the npy format, each sample has a file `NAME.npy` with the sets [T, L, K], and a file
    `NAME.valid.npy` with the validity [T]. In the pt format, each sample has one file `NAME.pt`, a
    dict of the tensors `sets` and `valid`. Only the manifest's rows and the routes of a few samples
    are in memory at the same time.

    Args:
        store: The run or recorded set.
        step: A sealed step.
        folder: The folder to write to; it is created if missing.
        form: The format of the files.

    Returns:
        The number of samples.

    Raises:
        TraceError: The step has no routes, a file already exists, the folder is not writable, or
            the format is pt and torch is not installed.
    """
    manifest = used_routes(store, step)
    if manifest.geometry is None:
        raise TraceError(
            f"step {step} in {store.uri}: no routes were recorded; the formats verl and slime "
            "contain samples without routes"
        )
    torch = _torch() if form == "pt" else None
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # The index gets its final name only when all files that it names exist.
        with _completed(folder / "samples.json") as out:
            head = {
                "experts": manifest.geometry.experts,
                "topk": manifest.geometry.topk,
                "layers": list(manifest.geometry.layers),
            }
            out.write(json.dumps(head)[:-1].encode() + b', "samples": [')
            for number, sample in enumerate(_samples(store, manifest)):
                entry = _write_sample(sample, folder, form, torch)
                out.write((", " if number else "").encode() + json.dumps(entry).encode())
            out.write(b"]}\n")
    return len(manifest.ids)


def export_for(
    store: Store, step: int, folder: Path, peer: Peer, num_layers: int | None = None
) -> ForPeer:
    """Write a step as `STEP.pt`, a torch file with the samples in a trainer's in-memory form.

    For verl, the file contains `{"ids": [...], "samples": [...]}`; each sample has the fields of
    AgentLoopOutput.as_dict. For slime, it contains `{"rollout_id": STEP, "samples": [...]}`, which
    slime's `--load-debug-rollout-data` reads.

    Samples that the trainer would reject are omitted. For verl, these are samples without a
    response, because no token can carry their reward. For slime, these are samples of one token,
    because they have no routes. Greedy baselines and other samples that have a reward but are not
    trained on are also omitted, because a trainer would count their rewards among their groups'
    rewards. All samples are in memory at the same time.

    Args:
        store: The run or recorded set.
        step: A sealed step, which may lack routes.
        folder: The folder to write to; it is created if missing.
        peer: The trainer.
        num_layers: The number of the model's decoder layers, including dense ones; None counts
            the layers up to the last MoE layer.

    Returns:
        The counts of exported and omitted samples.

    Raises:
        TraceError: Expert ids or layers do not fit into the trainer's form, all samples would be
            omitted, the file already exists, the folder is not writable, or torch is not installed.
    """
    manifest = used_routes(store, step)
    torch = _torch()
    samples: list[dict[str, Any]] = []
    ids: list[str] = []
    groups: dict[str, int] = {}
    conversations: dict[str, int] = {}
    untrained, unknown, not_counted, left_out = 0, 0, 0, 0
    not_trained = dict(zip(manifest.ids, manifest.rows["not_trained"].to_pylist(), strict=True))
    for sample in _samples(store, manifest):
        reason = not_trained[sample.id]
        if reason == BASELINE or (reason is not None and sample.reward is not None):
            not_counted += 1
            continue
        if _rejects(peer, sample):
            left_out += 1
            continue
        trained = _trained(sample)
        first = sample.branch_of or sample.id
        fields: dict[str, Any]
        try:
            if peer == "verl":
                fields = verl_sample(sample, trained, manifest.geometry, num_layers)
            else:
                numbers = {
                    "group_index": groups.setdefault(sample.group, len(groups)),
                    "index": len(samples),
                    "rollout_id": conversations.setdefault(first, len(conversations)),
                }
                fields = slime_sample(sample, trained, manifest.geometry, num_layers, numbers)
        except TraceError as error:
            raise TraceError(f"step {step} in {store.uri}, sample {sample.id}: {error}") from error
        samples.append({name: _tensor(value, torch) for name, value in fields.items()})
        ids.append(sample.id)
        untrained += not trained
        unknown += trained and unknown_logprobs(sample)
    if not samples:
        raise TraceError(
            f"step {step} in {store.uri}: no file for {peer}, because all {len(manifest.ids)} "
            f"samples would be left out: {left_out} that {peer} rejects, {not_counted} whose "
            "rewards do not count in their groups; use --format npy"
        )
    if unknown:  # both trainers infer the fields of all samples from the first sample
        for fields in samples:
            del fields[_LOGPROBS]
    named = {"ids": ids} if peer == "verl" else {"rollout_id": step}
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _completed(folder / f"{step}.pt") as out:
            _save_tensors(torch, {**named, "samples": samples}, out)
    return ForPeer(len(ids), untrained, left_out, not_counted, unknown)


def _rejects(peer: Peer, sample: Sample) -> bool:
    """Return whether a trainer rejects a batch that contains this sample.

    In verl, AgentLoopOutput.as_dict puts the reward at the last response token, so a response must
    not be empty. In slime, validate_rollout_routed_experts_for_replay requires a row of routes.
    """
    return len(sample.response_tokens_G) == 0 if peer == "verl" else len(sample.tokens_S) == 1


def _trained(sample: Sample) -> bool:
    """Return whether the trainer's loss can include a sample.

    Neither trainer can mark single rows as unknown, so a sample with unknown rows is excluded.
    """
    known = sample.routes is None or bool(sample.routes.valid_T.all())
    return sample.reward is not None and known


def _tensor(value: Any, torch: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _samples(store: Store, manifest: Manifest) -> Iterator[Sample]:
    """Yield a manifest's samples with their routes, in the manifest's order.

    Only a few samples are read at a time.
    """
    for ids in manifest.id_batches():
        found: dict[str, Routes] = {}
        if manifest.geometry is not None:
            found = read_routes(store, manifest, ids)
        for sample in read_samples(store, manifest, ids):
            yield replace(sample, routes=found.pop(sample.id, None))


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    # Stores do not raise OSError, so an OSError comes from writing to the folder.
    try:
        yield
    except FileExistsError as error:
        raise TraceError(
            f"cannot write {error.filename}: it already exists, and no file is overwritten; "
            "pass an empty folder on a case-sensitive file system"
        ) from error
    except OSError as error:
        raise TraceError(
            f"cannot write to {folder}: {error.strerror or error}; pass a writable folder with "
            "enough space for the arrays"
        ) from error


def _created(path: Path) -> BinaryIO:
    """Create a file. Raises FileExistsError if it exists."""
    return path.open("xb")


@contextmanager
def _completed(path: Path) -> Iterator[BinaryIO]:
    """Create a file that gets its name when the block ends; after an error, no file remains.

    Raises FileExistsError if it exists.
    """
    part = path.with_name(f"{path.name}.part")
    with _created(part) as out:
        try:
            yield out
            out.flush()
            if path.exists():
                raise FileExistsError(None, "it already exists", str(path))
            part.rename(path)
        except BaseException:
            part.unlink()
            raise


def _write_sample(sample: Sample, folder: Path, form: Format, torch: Any) -> dict[str, Any]:
    """Write a sample's arrays, and return its entry for samples.json."""
    name = file_name(sample.id)
    if sample.routes is not None:
        _save(folder, name, sample.routes, torch)
    return {
        "id": sample.id,
        "file": f"{name}.{form}",
        "prompt_length": len(sample.prompt_tokens_P),
        "tokens": sample.tokens_S.tolist(),
    }


def _save(folder: Path, name: str, routes: Routes, torch: Any) -> None:
    sets_TLK = np.ascontiguousarray(routes.sets_TLK)
    if torch is None:
        with _created(folder / f"{name}.npy") as out:
            np.save(out, sets_TLK)
        with _created(folder / f"{name}.valid.npy") as out:
            np.save(out, routes.valid_T)
    else:
        tensors = {"sets": _tensor(sets_TLK, torch), "valid": _tensor(routes.valid_T, torch)}
        with _created(folder / f"{name}.pt") as out:  # given a path, torch hides the OSError
            _save_tensors(torch, tensors, out)


def _save_tensors(torch: Any, content: dict[str, Any], out: BinaryIO) -> None:
    try:
        torch.save(content, out)
    except RuntimeError as error:  # raised when torch closes its archive after an OSError
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def _torch() -> Any:
    # Only .pt files need torch. It is imported by name, because an import contract checks that
    # `pipeline` does not depend on torch.
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise TraceError("this format needs torch: install it, or use --format npy") from error
