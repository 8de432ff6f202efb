"""Measure how fast prompts are read, checked, tokenised and staged, and how much memory this takes.

    python -m benchmarks.prompts                              # up to 40,000 prompts
    python -m benchmarks.prompts --prompts 1800000 --unique 1792

Each prompt has about 300 tokens of the example's tokenizer. The baseline is the tokenizer's library
alone, which tokenises the texts of the same prompts in batches. A new process runs each phase. Its
peak memory includes the interpreter and all libraries. Processor seconds include all threads, so on
two idle cores the phases that tokenise take about half as many seconds.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from benchmarks.measure import Phase, in_fresh_process, machine
from benchmarks.page import Table, arguments_of, block, publish
from pipeline.config.reading.load import load_config
from pipeline.inputs.check import check_inputs
from pipeline.inputs.stage import stage

EXAMPLE = Path(__file__).parents[1] / "examples"
FOLDER = Path("outputs/benchmarks")
SIZES = ((10_000, 10_000), (40_000, 40_000), (40_000, 1_792))
BATCH = 256
LEAD = "Work out the number that the question asks for, and write each step on its own line. " * 4


def text_of(number: int) -> str:
    """Return the text of a prompt."""
    return f"{LEAD}Question {number}: {number} boxes hold {number * 7 % 1000} parts; how many?"


def write_file(path: Path, prompts: int, unique: int) -> None:
    """Write a file of prompts in verl's layout, of which `unique` are different.

    Args:
        path: The file.
        prompts: The number of rows.
        unique: How many of them differ.
    """
    with pq.ParquetWriter(path, _rows([0]).schema, compression="zstd") as writer:
        for first in range(0, prompts, 10_000):
            rows = range(first, min(first + 10_000, prompts))
            writer.write_table(_rows([row % unique for row in rows]))


def _rows(numbers: list[int]) -> pa.Table:
    rows = (
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": text_of(number)}],
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"index": number},
        }
        for number in numbers
    )
    return pa.Table.from_pylist(list(rows))


def tokenise_alone(prompts: int, unique: int) -> int:
    """Tokenise the prompts with the tokenizer's library alone; return the number of tokens.

    Args:
        prompts: The number of prompts.
        unique: How many of them differ; each of these is tokenised once.
    """
    tokenizer = Tokenizer.from_file(str(EXAMPLE / "addition/model/tokenizer.json"))
    texts = list(map(text_of, range(min(prompts, unique))))
    batches: Iterator[list[str]] = (texts[i : i + BATCH] for i in range(0, len(texts), BATCH))
    return sum(len(one.ids) for batch in batches for one in tokenizer.encode_batch_fast(batch))


def stage_file(folder: Path) -> int:
    """Check a run's inputs and stage them, as each start does; return the number of prompts."""
    model = EXAMPLE / "addition/model"
    overrides = {
        "data.train_files": str(folder / "prompts.parquet"),
        "data.val_files": None,
        "data.max_prompt_length": 480,
        "actor_rollout_ref.model.path": str(model),
        "custom_reward_function.path": str(EXAMPLE / "addition/reward.py"),
        "store.uri": str(folder / "store"),
        "trainer.default_local_dir": str(folder / "local"),
    }
    config = load_config(EXAMPLE / "quickstart.yaml", list(overrides.items())).config
    return stage(check_inputs(config)).prompt_count


def measure(prompts: int, unique: int) -> dict[str, Phase]:
    """Measure all phases, keyed by name.

    Args:
        prompts: The number of prompts.
        unique: How many of them differ.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=FOLDER) as scratch:
        write_file(Path(scratch, "prompts.parquet"), prompts, unique)
        return {
            "tokenizers alone": in_fresh_process(tokenise_alone, prompts, unique),
            "first start": in_fresh_process(stage_file, Path(scratch)),
            "later start": in_fresh_process(stage_file, Path(scratch)),
        }


def table_of(found: dict[tuple[int, int], dict[str, Phase]]) -> Table:
    """Return the table of seconds, ratios to the baseline and peak memory."""
    headers = ("prompts", "different", "", "s", "CPU s", "prompts per CPU s", "CPU, ratio", "MB")
    rows = []
    for (prompts, unique), phases in found.items():
        baseline = phases["tokenizers alone"].cpu_s
        for name, phase in phases.items():
            rows.append(
                (
                    f"{prompts:,}",
                    f"{min(prompts, unique):,}",
                    name,
                    f"{phase.seconds:.1f}",
                    f"{phase.cpu_s:.1f}",
                    f"{prompts / phase.cpu_s:,.0f}",
                    f"{phase.cpu_s / baseline:.2f}",
                    f"{phase.peak_bytes / 1e6:,.0f}",
                )
            )
    return Table(headers, tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", type=int, help="in place of the default sizes")
    parser.add_argument("--unique", type=int, help="how many of them are different; default: all")
    arguments = arguments_of(parser)
    sizes = SIZES
    if arguments.prompts:
        sizes = ((arguments.prompts, arguments.unique or arguments.prompts),)
    if arguments.quick:
        sizes = ((64, 64), (64, 8))
    found = {size: measure(*size) for size in sizes}
    publish({"prompts": block(table_of(found), machine("pyarrow", "tokenizers"))}, arguments)


if __name__ == "__main__":
    main()
