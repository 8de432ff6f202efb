"""Measure manifests of large steps: sealing a step and looking up one data-parallel rank's share.

    python -m benchmarks.manifest [--samples N] [--tokens T]

A step has N samples of T tokens, in groups of 8 and in shards of 20 million tokens. By default, one
step has 100,000 samples of 8,192 tokens, and a second step has 10 million samples of 256 tokens.
The program creates artificial shards. Retrace's file writer writes their samples files column by
column, because writing 10 million samples one by one would take hours. The files contain all
columns that the manifest repeats, including digests. Each sample has only one prompt token and one
response token, because sealing and looking up do not read tokens. The commits describe routes files
that are not written, because this program does not read them.

The phases are `seal`, `open_manifest`, reading the columns that every rank needs for all samples
(group, reward and lengths, for advantages and the layout), and `select` for one rank's share. Each
phase runs in a new process. The share consists of every 64th sample in a random order, so that no
row group can be skipped. Seconds exclude the start of the process. Memory is the peak resident
memory, including the interpreter and pyarrow; the row "imports only" shows how much these take.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.measure import Phase, in_fresh_process, machine
from benchmarks.page import Table, arguments_of, block, publish
from pipeline.run import keys
from pipeline.run.commit import commit, new_write_id
from pipeline.store import open_store
from pipeline.traces import Geometry, Provenance, group_id, open_manifest, sample_id, seal
from pipeline.traces.format.header import TraceFile, with_header
from pipeline.traces.format.schema import SAMPLES, SEGMENTS
from pipeline.traces.write.rows import SAMPLES_TOKENS, SampleWriter

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
    """Tokens of each sample: its rows plus one."""

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.samples * self.tokens // TOKENS_OF_SHARD)

    def prompts(self, shard: int) -> range:
        """Return the prompts of a shard; as in plans, prompts are dealt to the shards in turn."""
        return range(shard, self.samples // GROUP, self.shards)

    def ids(self, shard: int) -> list[str]:
        """Return the sample ids that the step's plan expects in a shard."""
        return [sample_id(0, str(p), k) for p in self.prompts(shard) for k in range(GROUP)]


def fabricate(step: Step) -> int:
    """Commit the shards of step 0; return the size of their commits and samples files in bytes."""
    store = open_store(step.uri)
    for shard in range(step.shards):
        attempt = new_write_id()
        key = keys.rollout_file(0, shard, attempt, "samples")
        table = _samples(step.prompts(shard), step.tokens, np.random.default_rng(shard))
        size = max(1, SAMPLES_TOKENS // step.tokens)
        writer = SampleWriter(store, key, {}).file
        with writer:
            for i in range(0, len(table), size):
                writer.write_table(table.slice(i, size))
            file = writer.finish()
        rows = len(table) * (step.tokens - 1)
        routes = _described(keys.rollout_file(0, shard, attempt, "routes"), rows)
        body = {"step": 0, "shard": shard, "samples": len(table), "maker": {}}
        body = with_header(body, [routes, file], GEOMETRY, PROVENANCE, None, None)
        commit(store, keys.rollout(0, shard), body, attempt)
    return sum(info.size for info in store.list(keys.steps()))


def _samples(prompts: Sequence[int], tokens: int, rng: np.random.Generator) -> pa.Table:
    rows, P, T = len(prompts) * GROUP, tokens // 4, tokens - 1
    prompt_N = pc.cast(pa.array(np.repeat(np.asarray(prompts), GROUP)), pa.string())
    k_N = pc.cast(pa.array(np.tile(np.arange(GROUP), len(prompts))), pa.string())
    group_N = pc.binary_join_element_wise(group_id(0, ""), prompt_N, "")
    ones = np.ones(rows, np.int32)
    places = pa.StructArray.from_arrays(
        [pa.array(0 * ones), pa.array(T * np.arange(rows, dtype=np.int32)), pa.array(T * ones)],
        names=["start", "row", "tokens"],
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
        "rows_valid": T * ones,
        "rows_total": T * ones,
        "segments": _lists(places).cast(SEGMENTS),
        "prompt_tokens": _lists(pa.array(ones)),
        "response_tokens": _lists(pa.array(ones)),
        "loss_mask": _lists(pa.array(ones == 1)),
        "logprobs": _lists(pa.array(-rng.random(rows))),
        "finish_reason": pa.repeat("stop", rows),
        "version_spans": _lists(spans),
        "seed": rng.integers(0, 1 << 31, rows),
        "extras": pa.repeat("{}", rows),
        "branch_of": pa.nulls(rows, pa.string()),
    }
    return pa.table({name: columns[name] for name in SAMPLES.names}).cast(SAMPLES)


def _lists(values: pa.Array) -> pa.ListArray:
    """Return lists of one value each."""
    return pa.ListArray.from_arrays(pa.array(np.arange(len(values) + 1, dtype=np.int32)), values)


def _digests(number: int, rng: np.random.Generator) -> pa.StringArray:
    """Return random digests, which are all different and cannot be compressed."""
    text = rng.bytes(32 * number).hex().encode()
    ends = np.arange(0, len(text) + 1, 64, dtype=np.int32)
    return pa.StringArray.from_buffers(number, pa.py_buffer(ends), pa.py_buffer(text))


def _described(key: str, rows: int) -> TraceFile:
    """Describe a nonexistent routes file as a commit would."""
    digests = [np.random.default_rng(seed).bytes(32).hex() for seed in (rows, rows + 1)]
    return TraceFile(
        key=key,
        size=rows * GEOMETRY.row_bytes // 4,
        sha256=digests[0],
        role="routes",
        rows=rows,
        footer_size=100_000,
        footer_sha256=digests[1],
        layers=GEOMETRY.layers,
    )


def nothing(_: Step) -> int:
    """Do nothing, to measure the imports of this module."""
    return 0


def seal_all(step: Step) -> int:
    """Seal the step, as the flow does; return the size of the manifest's rows file in bytes."""
    return seal(open_store(step.uri), 0, step.shards, step.ids, 0).file.size


def open_it(step: Step) -> int:
    """Open the manifest's header; return the number of samples."""
    return open_manifest(open_store(step.uri), 0).samples


def columns_of_all(step: Step) -> int:
    """Read the columns that a rank needs for every sample; return the number of rows."""
    return len(open_manifest(open_store(step.uri), 0).columns(OF_ALL))


def share_of_rank(step: Step) -> int:
    """Select one rank's rows; return their number."""
    rows = np.random.default_rng(0).permutation(step.samples)[::RANKS]
    return len(open_manifest(open_store(step.uri), 0).select(rows).ids)


PHASES = {
    "imports only": nothing,
    "seal": seal_all,
    "open_manifest": open_it,
    "columns of all samples": columns_of_all,
    f"select a share of 1/{RANKS}": share_of_rank,
}


def measure(samples: int, tokens: int, folder: Path) -> dict[str, Phase]:
    """Measure all phases on a new step.

    Args:
        samples: Number of samples, a multiple of GROUP.
        tokens: Tokens of each sample.
        folder: Folder for the temporary store.

    Returns:
        The measurements, keyed by phase.

    Raises:
        ValueError: `samples` is not a multiple of GROUP.
    """
    if samples % GROUP:
        raise ValueError(f"{samples} samples: not a multiple of the group size, {GROUP}")
    with TemporaryDirectory(dir=folder) as scratch:
        step = Step(open_store(scratch).uri, samples, tokens)
        phases = {"(fabrication of the shards)": in_fresh_process(fabricate, step)}
        return phases | {name: in_fresh_process(work, step) for name, work in PHASES.items()}


def table_of(found: dict[tuple[int, int], dict[str, Phase]]) -> Table:
    """Return the table of seconds and peak memory by phase and step size."""
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
    parser.add_argument(
        "--samples", type=int, help="samples of a single step, in place of the two default steps"
    )
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each of these samples")
    arguments = arguments_of(parser)
    steps = [(arguments.samples, arguments.tokens)] if arguments.samples else STEPS
    if arguments.quick:
        steps = [(64, 8192)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    found = {step: measure(*step, FOLDER) for step in steps}
    publish({"manifest": block(table_of(found), machine("pyarrow"))}, arguments)


if __name__ == "__main__":
    main()
