"""Exit codes for workers that end with an error."""

from pipeline.errors import LastingError
from pipeline.exits import CONFIGURATION_ERROR


def exit_code(error: Exception) -> int:
    """Return 78 if the error would recur after a restart, else 1."""
    return CONFIGURATION_ERROR if isinstance(error, LastingError) else 1
