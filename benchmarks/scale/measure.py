"""Measure the coefficients of the model on this machine.

    python -m benchmarks.scale.measure [--write]

Seconds are the client's processor seconds, excluding the server's, so other programs hardly affect
them. `--write` updates the measured values in coefficients.json, but not the assumptions or the
simulation.
"""

import argparse
import hashlib
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import codings, manifest
from benchmarks.measure import in_fresh_process, machine
from benchmarks.minio import own_minio
from benchmarks.routes.recordings import Recording, recorded
from benchmarks.scale.coefficients import FILE, write_part
from benchmarks.ways import ours
from operators.training.batches import ahead
from operators.training.publish.kept import KeptShare
from pipeline.policies import coding
from pipeline.policies.weights import TensorPlace
from pipeline.run import keys, wait
from pipeline.store import Store, open_store
from pipeline.store.download import downloaded

SIZE = 64 << 20
"""Size in bytes of the object that is sent and fetched."""
WEIGHTS = 1 << 24
"""Number of weights of the policy whose difference is coded."""
Value = dict[str, Any]


def value(number: float, why: str) -> Value:
    """Return a coefficient as the file stores it, rounded to four significant digits."""
    return {"value": float(f"{number:.4g}"), "why": why}


def cpu_s(work: Callable[[], object], repetitions: int = 3) -> float:
    """Repeat some work and return the minimum of this process's processor seconds."""
    seconds = []
    for _ in range(repetitions):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return min(seconds)


def of_store(uri: str) -> dict[str, Value]:
    """Measure a client's processor time per request and per GB."""
    store, data = open_store(uri), np.random.default_rng(0).bytes(SIZE)
    store.create("small", b"x")
    asked = cpu_s(lambda: [store.size("small") for _ in range(200)]) / 200
    numbers = iter(range(1000))

    def send() -> None:
        digest, view = hashlib.sha256(), memoryview(data)
        with store.upload(f"large-{next(numbers)}") as upload:
            for at in range(0, SIZE, 16 << 20):
                digest.update(view[at : at + (16 << 20)])
                upload.write(view[at : at + (16 << 20)])
            upload.finish()

    sent = cpu_s(send) * 1e9 / SIZE
    with tempfile.TemporaryDirectory() as folder:
        fetched = cpu_s(lambda: _fetch(store, Path(folder) / "file")) * 1e9 / SIZE
    hashed = cpu_s(lambda: hashlib.sha256(data)) * 1e9 / SIZE
    return {
        "poll_cpu_s": value(asked, "one HEAD request"),
        "upload_cpu_s_per_gb": value(sent, "multipart upload with SHA-256"),
        "fetch_cpu_s_per_gb": value(fetched, "download to a file, with SHA-256"),
        "sha256_cpu_s_per_gb": value(hashed, "SHA-256 only"),
    }


def _fetch(store: Store, target: Path) -> None:
    with downloaded(store, "large-0", SIZE, target):
        pass


def of_differences(weights: int = WEIGHTS) -> dict[str, Value]:
    """Measure the size and cost of a difference: weights of scale 0.02, four Adam steps at 1e-6.

    Adam starts with moments like those after many steps, as in benchmarks.codings and in nearly all
    steps of a run. If the moments were zero, the first updates would be larger.
    """
    rng = np.random.default_rng(0)
    weights_W = 0.02 * rng.standard_normal(weights, np.float32)
    rate, steps = codings.GOAL
    (_, (old_W,)), (_, (new_W,)) = codings.adam(weights_W, (rate,), (steps,), rng)
    coded = coding.encode(old_W, new_W, 2)
    assert coded is not None
    with tempfile.TemporaryDirectory() as folder:
        place = TensorPlace("weights", "BF16", old_W.shape, 0, old_W.nbytes)
        kept = KeptShare(Path(folder), [[place]])
        kept.update(iter([memoryview(old_W).cast("B")]), compare=False)
        versions = itertools.cycle([new_W, old_W])

        def update() -> None:
            kept.update(iter([memoryview(next(versions)).cast("B")]), compare=True)

        updated = cpu_s(update) * 1e9 / old_W.nbytes
    target_W = old_W.copy()
    began = time.process_time()
    coding.apply(coded, target_W)
    applied = (time.process_time() - began) * 1e9 / old_W.nbytes
    assert np.array_equal(target_W, new_W)
    how = f"{weights / 1e6:.0f} M weights of scale 0.02, over {steps} steps late in training "
    how += f"with Adam at a learning rate of {rate:g}"
    return {
        "difference_share": value(
            len(coded) / old_W.nbytes,
            f"size of a coded difference, divided by the size of the policy in bfloat16: {how}",
        ),
        "update_cpu_s_per_gb": value(
            updated, "digests and coding of a difference, as a training rank, per GB of the policy"
        ),
        "apply_cpu_s_per_gb": value(applied, "applying a difference, per GB of the policy"),
    }


def of_traces(folder: Path, recording: Recording) -> dict[str, Value]:
    """Measure the bytes per token of routes and samples, as a worker writes them."""
    store = open_store(str(folder / "traces"))
    ours.write(store, ours.samples_of(recording), ours.geometry_of(recording), 0)
    sizes = {info.key.rsplit(".", 2)[-2]: info.size for info in store.list(keys.steps())}
    bits = recording.bound * recording.tokens * recording.layers
    return {
        "routes_over_entropy": value(
            sizes["routes"] / bits,
            "size of recorded routes in bytes, divided by the entropy of uniform sets",
        ),
        "sample_token_bytes": value(
            sizes["samples"] / recording.tokens, "bytes per token of a sample, without routes"
        ),
    }


def of_seal(folder: Path, samples: int = 10_000, shards: int = 50) -> dict[str, Value]:
    """Measure the processor time and the bytes of a manifest, per sample and per shard.

    Args:
        folder: Folder for temporary stores.
        samples: Number of samples in a step of one shard.
        shards: Number of shards in a step of few samples.
    """
    tokens = manifest.TOKENS_OF_SHARD
    many = manifest.Step(open_store(str(folder / "shards")).uri, 8 * shards, tokens // 8)
    much = manifest.Step(open_store(str(folder / "samples")).uri, samples, 1024)
    for step in (many, much):
        manifest.fabricate(step)
    manifest.seal_all(many)
    idle = in_fresh_process(manifest.nothing, much)
    sealed = in_fresh_process(manifest.seal_all, much)
    return {
        "seal_sample_cpu_s": value((sealed.cpu_s - idle.cpu_s) / samples, "sealing, per sample"),
        "manifest_shard_bytes": value(
            (open_store(many.uri).size(keys.manifest(0)) or 0) / many.shards,
            "size of manifest.json in bytes, per shard",
        ),
        "manifest_sample_bytes": value(
            sealed.result / samples, "size of the manifest's rows in bytes, per sample"
        ),
    }


def of_code() -> dict[str, Value]:
    """Return the coefficients that are constants in the code."""
    return {
        "longest_pause_s": value(
            wait._LONGEST_PAUSE_S,
            "longest pause between two polls of a waiting process (pipeline.run.wait)",
        ),
        "ahead_pause_s": value(
            ahead._PAUSE_S, "pause between two polls of a rank that looks for the next step"
        ),
        "worker_keys": value(
            2, "keys that a waiting worker polls: stop and plan, or stop and policy"
        ),
        "seal_shard_requests": value(
            4,
            "requests to seal a shard: HEAD, GETs of commit, footer and columns (counted by tests)",
        ),
        "share_requests": value(
            4,
            "requests of a rank that reads a step, apart from those per shard (counted by tests)",
        ),
        "share_shard_requests": value(
            4, "requests of a rank for each shard that contains its samples (counted by tests)"
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write the values into {FILE.name}")
    arguments = parser.parse_args()
    found: dict[str, Value] = {}
    with tempfile.TemporaryDirectory() as name, own_minio() as server:
        found |= of_store(f"{server.uri}/measure")
        found |= of_differences()
        found |= of_traces(Path(name), recorded())
        found |= of_seal(Path(name))
        found |= of_code()
    for key, one in found.items():
        print(f"{key}: {one['value']} ({one['why']})", flush=True)
    print(machine("boto3", "pyarrow", "numpy"))
    if arguments.write:
        write_part("measured", found)
        write_part("machine", {"measured": machine("boto3", "pyarrow", "numpy")})


if __name__ == "__main__":
    main()
