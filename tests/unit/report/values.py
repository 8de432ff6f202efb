"""A step's metrics, and the text of tables on a terminal."""

import io

from rich.console import Console

VALUES = {
    "critic/rewards/mean": 0.5,
    "mismatch/kl": 1.5e-3,
    "mismatch/kl_native": None,
    "replay/coverage": 1.0,
    "timing_s/train": 12.34,
}


def text_of(*renderables: object, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    for renderable in renderables:
        console.print(renderable)
    return console.file.getvalue()
