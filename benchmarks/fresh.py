"""Fresh routes of the example model: the rollout engine really generates them, once."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks.measure import in_fresh_process
from benchmarks.recordings import Recording
from pipeline.run.plan import Sampling
from pipeline.store import open_store
from pipeline.traces import read_manifest, read_routes
from pipeline.traces.format.manifest import sealed_steps

CACHE = Path("outputs/benchmarks/example-routes.npz")
EXAMPLE = Path("examples/addition")
PROMPTS, GROUP = 32, 8
NAME = "example model"


def generated(cache: Path = CACHE) -> Recording:
    """Routes of 32 prompts x 8 responses of examples/addition, made on the first call (a minute).

    Reads the repository's examples: run from its root.
    """
    if not cache.exists():
        in_fresh_process(_generate, cache)
    with np.load(cache) as saved:
        lengths, topk, layers = saved["lengths"], int(saved["topk"]), int(saved["layers"])
        flat = saved["routes"].reshape(-1, layers, topk)
        routes = np.split(flat, np.cumsum(lengths)[:-1])
        prompts, groups = saved["prompts"].tolist(), saved["groups"].tolist()
        return Recording(NAME, int(saved["experts"]), tuple(routes), tuple(prompts), tuple(groups))


def of_run(uri: str) -> Recording:
    """Routes of a finished run's last sealed step.

    A trace holds sets, sorted; each row is shuffled here, so that writing has to sort it again.
    Raises TraceError, StoreError; ValueError when the run has no sealed step.
    """
    store = open_store(uri)
    steps = sealed_steps(store)
    if not steps:
        raise ValueError(f"{uri}: no sealed step; give the root of a run, <store>/<name>")
    manifest = read_manifest(store, steps[-1])
    found = read_routes(store, manifest, manifest.ids)
    rng = np.random.default_rng(0)
    numbers: dict[str, int] = {}
    names = manifest.rows["group"].to_pylist()
    groups = tuple(numbers.setdefault(name, len(numbers)) for name in names)
    experts = manifest.geometry.experts if manifest.geometry else 0
    routes = tuple(rng.permuted(found[id].sets_TLK, axis=-1) for id in manifest.ids)
    prompts = tuple(manifest.rows["prompt_length"].to_pylist())
    return Recording(f"run {uri}", experts, routes, prompts, groups)


def _generate(cache: Path) -> None:
    """Run the engine; in a process of its own, because vLLM keeps threads and settings."""
    from operators.rollout.engine import RolloutEngine
    from operators.rollout.types import Request
    from pipeline.config.tree import Rollout
    from pipeline.inputs.tokenizer import ChatTokenizer
    from pipeline.traces import Geometry

    geometry = Geometry(experts=16, topk=4, layers=(0, 1, 2, 3))
    rows = pq.read_table(EXAMPLE / "train.parquet", columns=["prompt"])["prompt"][:PROMPTS]
    tokenizer = ChatTokenizer(EXAMPLE / "model")
    prompts = tokenizer.encode([tokenizer.render(messages) for messages in rows.to_pylist()])
    requests = [
        Request(f"{p}/{k}", tuple(ids), seed=1000 * p + k)
        for p, ids in enumerate(prompts)
        for k in range(GROUP)
    ]
    settings = Rollout(dtype="bfloat16", max_num_seqs=256, max_num_batched_tokens=4096)
    engine = RolloutEngine(EXAMPLE / "model", settings, True, 64, geometry)
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=24)
    with closing(engine.generate(requests, sampling)) as responses:
        raw = {finished.request.id: finished.routes_TDK for finished in responses}
    engine.close()
    ordered = [raw[request.id] for request in requests]
    cache.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        cache,
        routes=np.concatenate(ordered).ravel(),
        lengths=[len(routes_TLK) for routes_TLK in ordered],
        prompts=[len(request.prompt_tokens) for request in requests],
        groups=[int(request.id.split("/")[0]) for request in requests],
        experts=geometry.experts,
        topk=geometry.topk,
        layers=len(geometry.layers),
    )
