"""Write train.parquet and val.parquet in verl's layout: python examples/addition/make_data.py"""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from problems import DATA_SOURCE, TRAIN, VAL, Problem, split

HERE = Path(__file__).parent


def verl_row(problem: Problem, part: str, index: int) -> dict:
    """Return a problem as a row in verl's layout.

    Args:
        problem: The problem.
        part: The part of the split that contains the problem.
        index: The problem's index in its part.
    """
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"split": part, "index": index},
    }


def main() -> None:
    parts = split()
    for part in (TRAIN, VAL):
        rows = [verl_row(problem, part, index) for index, problem in enumerate(parts[part])]
        pq.write_table(pa.Table.from_pylist(rows), HERE / f"{part}.parquet", compression="zstd")
        print(f"{part}.parquet: {len(rows)} prompts, for example {rows[0]['prompt'][0]['content']}")


if __name__ == "__main__":
    main()
