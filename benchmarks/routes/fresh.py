"""Fresh routes, which the rollout engine generates once, and the list of all routes to measure."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow.parquet as pq

from benchmarks.measure import in_fresh_process
from benchmarks.routes.recordings import Recording, recorded, skewed, uniform
from pipeline.run.plan import Sampling
from pipeline.store import open_store
from pipeline.traces import Geometry, read_manifest, read_routes
from pipeline.traces.format.manifest import sealed_steps

CACHE = Path("outputs/benchmarks")
EXAMPLE = Path("examples/addition")
TEXTS = (Path("README.md"), Path("docs"))


def recordings(quick: bool, run: str | None = None) -> list[Recording]:
    """Return all kinds of routes to measure.

    Args:
        quick: Whether to return only tiny routes that do not require an engine.
        run: URI of a run whose routes replace the example model's.
    """
    if quick:
        few = uniform(16, 4, samples=8, rows=33, layers=4)
        return [few, uniform(512, 10, samples=2, rows=65, layers=2)]
    example = of_run(run) if run else generated("example model", _example)
    fresh = generated("fresh, 128 experts", _untrained)
    drawn = [skewed(by_id=False), skewed(by_id=True)]
    return [recorded(), example, fresh, *drawn, *map(uniform, (128, 256, 512), (8, 8, 10))]


def generated(name: str, make: Callable[[Path], None], folder: Path = CACHE) -> Recording:
    """Return routes that an engine generates on the first call; later calls read them from a file.

    Generating takes a minute. Call this function from the repository's root, because it reads the
    examples and docs.

    Args:
        name: Name of the recording.
        make: Function that generates the routes and writes them to a file.
        folder: Folder for the file.
    """
    cache = folder / f"{make.__name__.strip('_')}-routes.npz"
    if not cache.exists():
        in_fresh_process(make, cache)
    with np.load(cache) as saved:
        lengths, topk, layers = saved["lengths"], int(saved["topk"]), int(saved["layers"])
        flat = saved["routes"].reshape(-1, layers, topk)
        routes = np.split(flat, np.cumsum(lengths)[:-1])
        prompts, groups = saved["prompts"].tolist(), saved["groups"].tolist()
        return Recording(name, int(saved["experts"]), tuple(routes), tuple(prompts), tuple(groups))


def of_run(uri: str) -> Recording:
    """Return the routes of a finished run's last sealed step.

    A trace contains sorted sets. Each row is shuffled here, so that the writer has to sort it
    again. Raises TraceError, StoreError, or ValueError if the run has no sealed step.
    """
    store = open_store(uri)
    steps = sealed_steps(store)
    if not steps:
        raise ValueError(f"{uri}: no sealed step; expected the root of a run, <store>/<name>")
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


def _example(cache: Path) -> None:
    """Generate 8 responses to each of 32 prompts from examples/addition; a sample has 33 rows."""
    from pipeline.inputs.tokenizer import ChatTokenizer

    rows = pq.read_table(EXAMPLE / "train.parquet", columns=["prompt"])["prompt"][:32]
    tokenizer = ChatTokenizer(EXAMPLE / "model")
    prompts = tokenizer.encode([tokenizer.render(messages) for messages in rows.to_pylist()])
    geometry = Geometry(experts=16, topk=4, layers=(0, 1, 2, 3))
    _generate(EXAMPLE / "model", geometry, prompts, 8, 24, cache)


def _untrained(cache: Path) -> None:
    """Let a small Qwen3-MoE with random weights continue 64 pieces of the docs (511 rows each)."""
    from transformers import AutoTokenizer

    from tests.tiny_models import make_tiny

    pages = [page for path in TEXTS for page in sorted(path.rglob("*.md")) or [path]]
    with TemporaryDirectory() as scratch:
        model = make_tiny(
            Path(scratch),
            "qwen3_moe",
            num_experts=128,
            num_experts_per_tok=8,
            num_hidden_layers=6,
        )
        tokenizer = AutoTokenizer.from_pretrained(model)
        ids = tokenizer("\n".join(page.read_text() for page in pages))["input_ids"]
        prompts = [ids[start : start + 384] for start in range(0, 64 * 384, 384)]
        geometry = Geometry(experts=128, topk=8, layers=tuple(range(6)))
        _generate(model, geometry, prompts, 1, 128, cache)


def _generate(
    model: Path,
    geometry: Geometry,
    prompts: Sequence[Sequence[int]],
    group: int,
    tokens: int,
    cache: Path,
) -> None:
    """Run the engine. Call this in a separate process, because vLLM keeps threads and settings."""
    from operators.rollout.engine import RolloutEngine
    from operators.rollout.types import Request
    from pipeline.config.tree import Rollout

    requests = [
        Request(f"{p}/{k}", tuple(ids), seed=1000 * p + k)
        for p, ids in enumerate(prompts)
        for k in range(group)
    ]
    settings = Rollout(dtype="bfloat16", max_num_seqs=256, max_num_batched_tokens=4096)
    longest = max(map(len, prompts)) + tokens
    engine = RolloutEngine(model, settings, True, longest, geometry)
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=tokens)
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
