"""The signal to the launcher that a worker has loaded its model."""

import os
from pathlib import Path


def say_ready() -> None:
    """Create the file that RETRACE_READY_FILE names, if this variable is set.

    Kubernetes treats the pod as ready once this file exists.
    """
    path = os.environ.get("RETRACE_READY_FILE")
    if path is not None:
        Path(path).touch()
