"""The signal to a launcher that a worker has loaded its model."""

import os
from pathlib import Path


def say_ready() -> None:
    """Create the file RETRACE_READY_FILE, if that variable is set; it makes a pod ready."""
    path = os.environ.get("RETRACE_READY_FILE")
    if path is not None:
        Path(path).touch()
