"""The exit code of a worker after an error."""

from pipeline.errors import InputError
from pipeline.exits import CONFIGURATION_ERROR
from pipeline.store import RefusedError


def exit_code(error: Exception) -> int:
    """78 if a restart would meet the same error again, else 1."""
    return CONFIGURATION_ERROR if isinstance(error, RefusedError | InputError) else 1
