"""Write the table of docs/sizes.md: for each model, a layout that fits according to the estimate.

python -m tests.sizes_page
"""

from collections.abc import Iterator
from typing import Any

from pipeline.config.rules.layout import layout_problems
from pipeline.inputs.sizes.estimate import estimate_memory
from pipeline.inputs.sizes.memory import GIB, Memory
from tests.large_models import FULL, MODELS, config_of, hf_config
from tests.paths import ROOT

PAGE = ROOT / "docs" / "sizes.md"
BEGIN, END = "<!-- tables: python -m tests.sizes_page -->\n", "<!-- end of tables -->\n"
NODES = (1, 2, 4, 16)
GPUS = {"80 GB": 79 * GIB, "141 GB": 140 * GIB}
"""Memory that an H100 and an H200 offer to a process, rounded down."""
NAMES = {
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "glm-4.5-air": "GLM-4.5-Air",
    "qwen3-235b-a22b": "Qwen3-235B-A22B",
    "deepseek-v3": "DeepSeek-V3",
}
_SIZES = (1, 2, 4, 8, 16, 32, 64)


def layouts(model: str, nodes: int) -> Iterator[tuple[dict[str, Any], Memory]]:
    """Yield layouts that Megatron-core can build, ordered by PP, then TP, then EP."""
    hf, ranks = hf_config(model), 8 * nodes
    for pp in _SIZES:
        last = hf["num_hidden_layers"] - (pp - 1) * -(-hf["num_hidden_layers"] // pp)
        if last < 1:
            continue
        uneven = {} if hf["num_hidden_layers"] % pp == 0 else {"last": last}
        for tp in _SIZES[:4]:
            for ep in _SIZES:
                sizes = {"tp": tp, "pp": pp, "ep": ep}
                if ranks % (tp * pp) or ranks % (ep * (tp if ep == 1 else 1) * pp):
                    continue
                config = config_of(nodes, **sizes, **uneven, override=FULL)
                if not layout_problems(config, hf):
                    yield sizes, estimate_memory(config, hf)


def cell(found: list[tuple[dict[str, Any], Memory]], limit: int) -> str:
    """Return a cell with the first layout that fits or, if none does, the least memory needed."""
    for sizes, memory in found:
        if memory.training <= limit:
            layout = " ".join(f"{name.upper()}{size}" for name, size in sizes.items())
            host = f"host {memory.host_checkpoint / GIB:,.0f}"
            return f"{layout}: {memory.training / GIB:.0f} GiB, {host}"
    least = min(memory.training for _, memory in found)
    return f"none: at least {least / GIB:.0f} GiB needed"


def table() -> str:
    """Return the table, with a row for each combination of model and number of nodes."""
    rows = ["| model | nodes | " + " | ".join(f"GPUs of {gpu}" for gpu in GPUS) + " |\n"]
    rows.append("|---|---|" + "---|" * len(GPUS) + "\n")
    for model, name in NAMES.items():
        for nodes in NODES:
            found = list(layouts(model, nodes))
            cells = " | ".join(cell(found, limit) for limit in GPUS.values())
            rows.append(f"| {name}, {MODELS[model] / 1e9:.1f} B | {nodes} | {cells} |\n")
    return "".join(rows)


def render() -> str:
    """Return the page with a table from the current estimate."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(render())
