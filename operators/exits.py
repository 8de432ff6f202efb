"""The exit code of a worker after an error."""

from pipeline.errors import LastingError
from pipeline.exits import CONFIGURATION_ERROR


def exit_code(error: Exception) -> int:
    """78 if a restart would meet the same error again, else 1."""
    return CONFIGURATION_ERROR if isinstance(error, LastingError) else 1
