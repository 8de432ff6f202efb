"""With which exit code a worker ends after an error."""

from pipeline.config.errors import InputError
from pipeline.config.exits import CONFIGURATION_ERROR
from pipeline.store import RefusedError


def exit_code(error: Exception) -> int:
    """78 where a restart would meet the same error again, otherwise 1."""
    return CONFIGURATION_ERROR if isinstance(error, RefusedError | InputError) else 1
