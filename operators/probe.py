"""`python -m operators.probe NAME`: what a heavy library says about this machine, as a JSON line.

In a process of its own, because the library takes seconds to import, keeps what it has found for
the life of its process, and may end it.
"""

import json
import sys
from collections.abc import Callable
from typing import Any


def torch_findings() -> dict[str, Any]:
    """The fields of pipeline.device.TorchFindings."""
    import torch

    error = None
    if torch.version.cuda is not None:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except RuntimeError as found:  # no driver, or one that is too old
            error = " ".join(str(found).split())
    return {
        "version": torch.__version__,
        "built_for": torch.version.cuda,
        "devices": torch.cuda.device_count(),
        "error": error,
    }


PROBES: dict[str, Callable[[], dict[str, Any]]] = {"torch": torch_findings}

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]]()))  # noqa: T201
