"""The manifest of large steps: sealing it, and looking up what one data-parallel rank needs.

    python -m benchmarks.manifest [--samples N] [--tokens T]

A step of N samples of T tokens, in groups of 8, lies in shards of 20 million tokens, as if rollout
workers had written them; by default 100,000 samples of 8,192 tokens, then 10 million of 256. The
shards are fabricated: their samples files are made column by column with the project's own file
writer (sample by sample, 10 million would take hours), with all that the manifest takes from them,
digests included, but one prompt and one response token per sample, which neither sealing nor
looking up reads. Their routes files are described in the commits, every range of every row group
of 48 layers, but not written: nobody reads them here.

Then, each in a fresh process: `seal`; `open_manifest`; the columns that every rank reads of all
samples (group, reward, lengths: for advantages and the layout); `select` of one rank's share: every
64th sample in a random order, so that no row group can be left out. Seconds leave out the start of
the process; memory is the most that was resident, the interpreter and pyarrow included (the row
"imports alone").
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.measure import Phase, in_fresh_process, machine
from benchmarks.page import Table, arguments_of, block, publish
from pipeline.run import keys
from pipeline.run.commit import DataFile, commit, new_write_id
from pipeline.store import open_store
from pipeline.traces import Geometry, Provenance, group_id, open_manifest, sample_id, seal
from pipeline.traces.format.chunks import Range, RowGroup, TraceFile
from pipeline.traces.format.header import with_header
from pipeline.traces.format.schema import SAMPLES, SEGMENTS, layer_column, routes_schema
from pipeline.traces.write.files import FileWriter
from pipeline.traces.write.rows import ROW_GROUP_TOKENS as SAMPLES_TOKENS
from pipeline.traces.write.segments import ROW_GROUP_TOKENS as ROUTES_TOKENS

FOLDER = Path("outputs/benchmarks")
GEOMETRY = Geometry(experts=128, topk=8, layers=tuple(range(48)))
PROVENANCE = Provenance("R3", 0, "benchmark")
GROUP, TOKENS_OF_SHARD, RANKS = 8, 20_480_000, 64
STEPS = [(100_000, 8192), (10_000_000, 256)]
OF_ALL = ("group", "reward", "prompt_length", "response_length")


@dataclass(frozen=True)
class Step:
    """A step to seal. Example: Step('file:///tmp/x', samples=100_000, tokens=8192)."""

    uri: str
    samples: int
    tokens: int
    """Of each sample; one more than it has rows."""

    @property
    def shards(self) -> int:
        """How many it has."""
        return -(-self.samples * self.tokens // TOKENS_OF_SHARD)

    def prompts(self, shard: int) -> range:
        """The prompts of a shard: dealt out one by one, as plans do."""
        return range(shard, self.samples // GROUP, self.shards)

    def ids(self, shard: int) -> list[str]:
        """What the step's plan expects of a shard."""
        return [sample_id(0, str(p), k) for p in self.prompts(shard) for k in range(GROUP)]


def fabricate(step: Step) -> int:
    """Commit the shards of step 0; bytes of their commits and samples files."""
    store = open_store(step.uri)
    for shard in range(step.shards):
        attempt = new_write_id()
        key = keys.rollout_file(0, shard, attempt, "samples")
        table = _samples(step.prompts(shard), step.tokens, np.random.default_rng(shard))
        size = max(1, SAMPLES_TOKENS // step.tokens)
        with FileWriter(store, key, "samples", SAMPLES) as writer:
            for i in range(0, len(table), size):
                writer.write_table(table.slice(i, size))
            file = writer.finish()
        routes = _described(keys.rollout_file(0, shard, attempt, "routes"), step, len(table))
        commit_key = keys.rollout(0, shard)
        body = {"step": 0, "shard": shard, "samples": len(table), "maker": {}}
        commit(
            store,
            commit_key,
            with_header(body, [routes, file], GEOMETRY, PROVENANCE, None),
            attempt,
        )
    return sum(info.size for info in store.list(keys.steps()))


def _samples(prompts: Sequence[int], tokens: int, rng: np.random.Generator) -> pa.Table:
    rows, P = len(prompts) * GROUP, tokens // 4
    prompt_N = pc.cast(pa.array(np.repeat(np.asarray(prompts), GROUP)), pa.string())
    k_N = pc.cast(pa.array(np.tile(np.arange(GROUP), len(prompts))), pa.string())
    group_N = pc.binary_join_element_wise(group_id(0, ""), prompt_N, "")
    ones = np.ones(rows, np.int32)
    places = pa.StructArray.from_arrays(
        [
            pa.array(np.arange(2 * rows, dtype=np.int32)),
            pa.array(np.tile([P, tokens - 1 - P], rows)),
        ],
        names=["row", "tokens"],
    )
    spans = pa.StructArray.from_arrays(
        [pa.array(0 * ones), pa.array(0 * ones), pa.array(ones)], names=["version", "start", "end"]
    )
    columns = {
        "id": pc.binary_join_element_wise(group_N, k_N, "/"),
        "group": group_N,
        "prompt_id": prompt_N,
        "policy_version": 0 * ones,
        "prompt_length": P * ones,
        "response_length": (tokens - P) * ones,
        "reward": rng.integers(0, 2, rows).astype(np.float64),
        "reward_error": pa.nulls(rows, pa.string()),
        "token_digest": _digests(rows, rng),
        "routes_digest": _digests(rows, rng),
        "rows_valid": (tokens - 1) * ones,
        "rows_total": (tokens - 1) * ones,
        "segments": _lists(places, 2).cast(SEGMENTS),
        "prompt_tokens": _lists(pa.array(ones), 1),
        "response_tokens": _lists(pa.array(ones), 1),
        "loss_mask": _lists(pa.array(ones == 1), 1),
        "logprobs": _lists(pa.array(-rng.random(rows)), 1),
        "finish_reason": pa.repeat("stop", rows),
        "version_spans": _lists(spans, 1),
        "seed": rng.integers(0, 1 << 31, rows),
        "extras": pa.repeat("{}", rows),
        "branch_of": pa.nulls(rows, pa.string()),
    }
    return pa.table({name: columns[name] for name in SAMPLES.names}).cast(SAMPLES)


def _lists(values: pa.Array, each: int) -> pa.ListArray:
    ends: npt.NDArray[np.int32] = np.arange(0, len(values) + 1, each, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), values)


def _digests(number: int, rng: np.random.Generator) -> pa.StringArray:
    """Random digests; no two are the same and none compresses."""
    text = rng.bytes(32 * number).hex().encode()
    ends = np.arange(0, len(text) + 1, 64, dtype=np.int32)
    return pa.StringArray.from_buffers(number, pa.py_buffer(ends), pa.py_buffer(text))


def _described(key: str, step: Step, samples: int) -> TraceFile:
    """A routes file that is not there: its ranges, all different, as a commit lists them."""
    leaves = tuple(routes_schema(GEOMETRY).names)
    sizes = [20_000 if name.startswith(layer_column(0)[:6]) else 500 for name in leaves]
    rng, at, groups = np.random.default_rng(samples), 4, []
    for _ in range(-(-samples * step.tokens // ROUTES_TOKENS)):
        chunks = []
        for size in sizes:
            chunks.append(Range(at, size, rng.bytes(32).hex()))
            at += size
        groups.append(RowGroup(max(1, 2 * ROUTES_TOKENS // step.tokens), tuple(chunks)))
    footer = Range(at, 100_000, rng.bytes(32).hex())
    data = DataFile(key, at + 100_000, rng.bytes(32).hex())
    return TraceFile(data, "routes", footer, leaves, tuple(groups))


def nothing(_: Step) -> int:
    """Import what this module imports."""
    return 0


def seal_all(step: Step) -> int:
    """What the flow does; bytes of the manifest's rows."""
    return seal(open_store(step.uri), 0, step.shards, step.ids, 0).file.data.size


def open_it(step: Step) -> int:
    """The header; how many samples."""
    return open_manifest(open_store(step.uri), 0).samples


def columns_of_all(step: Step) -> int:
    """What a rank reads of every sample; rows."""
    return len(open_manifest(open_store(step.uri), 0).columns(OF_ALL))


def share_of_rank(step: Step) -> int:
    """One rank's rows; how many."""
    rows = np.random.default_rng(0).permutation(step.samples)[::RANKS]
    return len(open_manifest(open_store(step.uri), 0).select(rows).ids)


PHASES = {
    "imports alone": nothing,
    "seal": seal_all,
    "open_manifest": open_it,
    "columns of all samples": columns_of_all,
    f"select a share of 1/{RANKS}": share_of_rank,
}


def measure(samples: int, tokens: int, folder: Path) -> dict[str, Phase]:
    """All phases on a fresh step of so many samples. Raises ValueError for half a group."""
    if samples % GROUP:
        raise ValueError(f"{samples} samples: not a multiple of the groups' {GROUP}")
    with TemporaryDirectory(dir=folder) as scratch:
        step = Step(open_store(scratch).uri, samples, tokens)
        phases = {"(fabricating the shards)": in_fresh_process(fabricate, step)}
        return phases | {name: in_fresh_process(work, step) for name, work in PHASES.items()}


def table_of(found: dict[tuple[int, int], dict[str, Phase]]) -> Table:
    """Seconds and peak memory by phase and size of the step."""
    headers = [""]
    for samples, tokens in found:
        headers += [f"{samples:,} x {tokens:,} tokens: s", "CPU s", "peak MB"]
    rows = []
    for name in next(iter(found.values())):
        cells = [name]
        for phases in found.values():
            phase = phases[name]
            cells += [
                f"{phase.seconds:.2f}",
                f"{phase.cpu_s:.2f}",
                f"{phase.peak_bytes / 1e6:,.0f}",
            ]
        rows.append(tuple(cells))
    return Table(tuple(headers), tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--samples", type=int, help="of one step instead of the two")
    parser.add_argument("--tokens", type=int, default=256, help="of each of these samples")
    arguments = arguments_of(parser)
    steps = [(arguments.samples, arguments.tokens)] if arguments.samples else STEPS
    if arguments.quick:
        steps = [(64, 8192)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    found = {step: measure(*step, FOLDER) for step in steps}
    publish({"manifest": block(table_of(found), machine("pyarrow"))}, arguments)


if __name__ == "__main__":
    main()
