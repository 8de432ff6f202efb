"""Measure the size and speed of four codings of the differences between policies.

    python -m benchmarks.codings [--run URI]

The bf16 weights have the shapes of one layer of Qwen3-30B-A3B: attention, router, norms and all 128
experts, 1.25 GB in total. They are drawn from a normal distribution. Adam trains them with fp32
master weights, betas 0.9 and 0.999, and initial moments like those reached after many steps. The
gradients are noise plus a mean, which is constant for each weight and a tenth as large as the
noise. The tensors are trained and measured one at a time, so the program needs memory for only one
of them. `--run` adds the policies of a finished run, each as the difference from the previous one.

Speeds are given in bytes of weights per processor second on one core, without digests. After
applying a difference, the program compares the result with the new version.
"""

import argparse
import resource
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from benchmarks.measure import machine
from benchmarks.page import Table, arguments_of, block, publish, verdict
from benchmarks.ways.differences import OURS, WAYS, Way, Words, size
from pipeline.policies.fetch import fetch_policy
from pipeline.policies.weights import LENGTH, SUFFIX, parse_header
from pipeline.store import open_store
from pipeline.store.base import ObjectMissingError

HEADERS = ("", "changed words", *(way.name for way in WAYS), "make", "apply")
WAY_HEADERS = ("lr 1e-6, 4 steps", "bytes", "make", "apply")
RATES = (1e-6, 1e-5, 5e-4)
STEPS = (1, 4, 16)
GOAL = (1e-6, 4)
MOST_BYTES, LEAST_GB_S = 0.03, 1.0
EXPERTS = 128
HIDDEN, HEADS, KEYS, EXPERT = 2048, 4096, 512, 768
_DTYPES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}

Floats = npt.NDArray[np.float32]
Shape = tuple[tuple[int, ...], float, float]
"""Shape, mean and standard deviation of a tensor."""


@dataclass
class Found:
    """Bytes and seconds that a coding took for some tensors."""

    coded: int = 0
    make_s: float = 0.0
    apply_s: float = 0.0


@dataclass
class Row:
    """Results of all codings for the same tensors."""

    bytes: int
    words: int
    changed: int
    ways: dict[str, Found]

    @classmethod
    def empty(cls) -> "Row":
        """Return a row without tensors."""
        return cls(0, 0, 0, {way.name: Found() for way in WAYS})

    def speeds(self, way: Way) -> tuple[float, float]:
        """Return the speeds of coding and applying, each in GB of weights per processor second."""
        found = self.ways[way.name]
        return self.bytes / found.make_s / 1e9, self.bytes / found.apply_s / 1e9


def shapes(experts: int = EXPERTS) -> Iterator[Shape]:
    """Yield the shapes of the tensors of a layer with this number of experts."""
    for shape in ((HEADS, HIDDEN), (KEYS, HIDDEN), (KEYS, HIDDEN), (HIDDEN, HEADS), (128, HIDDEN)):
        yield shape, 0.0, 0.02
    for norm in (HIDDEN, HIDDEN, 128, 128):
        yield (norm,), 1.0, 0.1
    for _ in range(experts):
        yield from [((EXPERT, HIDDEN), 0.0, 0.02)] * 2
        yield (HIDDEN, EXPERT), 0.0, 0.02


def as_bf16(weights: Floats) -> npt.NDArray[np.uint16]:
    """Return bf16 bit patterns, rounded to nearest, ties to even."""
    bits = weights.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def adam(
    weights: Floats, rates: Sequence[float], steps: Iterable[int], rng: np.random.Generator
) -> Iterator[tuple[int, list[npt.NDArray[np.uint16]]]]:
    """Train weights with Adam on random gradients, at several learning rates simultaneously.

    The gradients do not depend on the weights, so all learning rates share them.

    Args:
        weights: float32 [N].
        rates: Learning rates.
        steps: Step counts after which to yield the weights.
        rng: Source of gradients and moments.

    Yields:
        The step count and, for each learning rate, the weights as bf16 bit patterns, beginning with
        step 0, the initial weights.
    """
    wanted = set(steps)
    size = weights.size
    mean = rng.standard_normal(size, np.float32) * np.float32(0.1)
    first = mean + rng.standard_normal(size, np.float32) * np.float32((0.1 / 1.9) ** 0.5)
    second = np.square(mean) + 1
    yield 0, [as_bf16(weights)] * len(rates)
    trained = [weights.copy() for _ in rates]
    del weights
    for step in range(1, max(wanted) + 1):
        gradient = rng.standard_normal(size, np.float32)
        gradient += mean
        change = np.square(gradient)
        second += np.float32(0.001) * np.subtract(change, second, out=change)
        first += np.float32(0.1) * np.subtract(gradient, first, out=gradient)
        np.divide(first, np.sqrt(second, out=change), out=change)
        for rate, own in zip(rates, trained, strict=True):
            own -= np.multiply(change, np.float32(rate), out=gradient)
        del gradient, change
        if step in wanted:
            yield step, [as_bf16(own) for own in trained]


def measure(row: Row, old: Words, new: Words, ways: Iterable[Way] = WAYS) -> None:
    """Code and apply the difference of a tensor, and add the results to a row.

    Args:
        row: Row to change.
        old: Words of the tensor in the old version.
        new: Words of the tensor in the new version.
        ways: Codings to measure.

    Raises:
        ValueError: A coding did not restore the new words.
    """
    row.bytes += old.nbytes
    row.words += old.size
    row.changed += int(np.count_nonzero(old != new))
    for way in ways:
        target = old.copy()
        began = time.process_time()
        coded = way.code(old, new)
        made = time.process_time()
        way.patch(coded, target)
        applied = time.process_time()
        if not np.array_equal(target, new):
            raise ValueError(f"{way.name}: the patched words differ from the new version")
        found = row.ways[way.name]
        found.make_s += made - began
        found.apply_s += applied - made
        found.coded += size(coded)


def synthetic(tensors: Iterable[Shape]) -> dict[str, Row]:
    """Measure differences between two versions of synthetic weights, tensor by tensor.

    Args:
        tensors: Shapes of the tensors.

    Returns:
        A row for each learning rate and number of optimizer steps, keyed by its name in the table.
    """
    rows = {cell(rate, step): Row.empty() for rate in RATES for step in STEPS}
    for number, (shape, mean, spread) in enumerate(tensors):
        rng = np.random.default_rng(number)
        initial = rng.normal(mean, spread, shape)
        versions = adam(initial.astype(np.float32).ravel(), RATES, STEPS, rng)
        del initial
        _, (old, *_) = next(versions)
        for step, found in versions:
            for rate, new in zip(RATES, found, strict=True):
                measure(rows[cell(rate, step)], old, new)
    return rows


def cell(rate: float, step: int) -> str:
    """Return a row's name. Example: 'lr 1e-06, 4 steps'."""
    return f"lr {rate:.0e}, {step} step{'s' * (step > 1)}"


def tensors_of(folder: Path) -> dict[str, Words]:
    """Return all tensors of a policy as words, keyed by name."""
    found = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        data = path.read_bytes()
        begin = LENGTH + int.from_bytes(data[:LENGTH], "little")
        for place in parse_header(data[LENGTH:begin]):
            dtype = f"<u{_DTYPES[place.dtype]}"
            found[place.name] = np.frombuffer(data[begin + place.begin : begin + place.end], dtype)
    return found


def of_run(uri: str) -> Row:
    """Measure the difference between each policy version of a run and the previous one."""
    store, row = open_store(uri), Row.empty()
    with TemporaryDirectory() as scratch:
        former: dict[str, Words] = {}
        version = 1
        while True:
            folder = Path(scratch) / str(version)
            try:
                fetch_policy(store, version, folder)
            except ObjectMissingError:
                return row
            tensors = tensors_of(folder)
            for name in former:
                measure(row, former[name], tensors[name])
            former, version = tensors, version + 1


def table_of(rows: dict[str, Row]) -> Table:
    """Return the table with the sizes of all codings and the speed of Retrace's coding."""
    lines = []
    for name, row in rows.items():
        shares = (f"{100 * row.ways[way.name].coded / row.bytes:.2f}%" for way in WAYS)
        speeds = (f"{speed:.2f} GB/s" for speed in row.speeds(OURS))
        lines.append((name, f"{100 * row.changed / row.words:.1f}%", *shares, *speeds))
    return Table(HEADERS, tuple(lines))


def ways_of(row: Row) -> Table:
    """Return the table that compares the codings on the same tensors."""
    lines = []
    for way in WAYS:
        speeds = (f"{speed:.2f} GB/s" for speed in row.speeds(way))
        lines.append((way.name, f"{100 * row.ways[way.name].coded / row.bytes:.2f}%", *speeds))
    return Table(WAY_HEADERS, tuple(lines))


def goals(row: Row) -> Table:
    """Return the table that compares the measured values with their limits."""
    share = row.ways[OURS.name].coded / row.bytes
    make, apply = row.speeds(OURS)
    least = f">= {LEAST_GB_S:.0f} GB/s"
    lines = (
        ("bytes", f"<= {MOST_BYTES:.0%}", f"{share:.2%}", verdict(share <= MOST_BYTES)),
        ("make", least, f"{make:.2f} GB/s", verdict(make >= LEAST_GB_S)),
        ("apply", least, f"{apply:.2f} GB/s", verdict(apply >= LEAST_GB_S)),
    )
    return Table((f"{row.bytes / 1e9:.2f} GB, lr 1e-6, 4 steps", "limit", "found", ""), lines)


def used(seconds: float) -> str:
    """Return the sentence below the tables about the program's own duration and memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"The program took {seconds:,.0f} s and at most {peak / 1e6:,.0f} MB of memory."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", help="URI of a finished run whose policies are measured as well")
    arguments = arguments_of(parser)
    began = time.monotonic()
    tensors = [((128, HIDDEN), 0.0, 0.02)] if arguments.quick else list(shapes())
    rows = synthetic(tensors)
    goal = rows[cell(*GOAL)]
    if arguments.run:
        rows[f"policies of {arguments.run.rpartition('/')[2]}"] = of_run(arguments.run)
    end = (used(time.monotonic() - began), machine("numpy", "pyarrow"))
    publish({"codings": block(table_of(rows), ways_of(goal), goals(goal), *end)}, arguments)


if __name__ == "__main__":
    main()
