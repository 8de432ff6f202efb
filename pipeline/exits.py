"""The exit code and the log line that workers use to report errors to their launcher."""

CONFIGURATION_ERROR = 78
"""The exit code for errors that would recur after a restart (LastingError): incorrect credentials,
a missing bucket, unusable input, a reward function that raises. The number is EX_CONFIG of BSD's
sysexits.h."""

RANK_FAILED = "rank %s failed: %s"
"""The message that a training rank logs, at level ERROR, to report its number and the error that
ended it. The message is needed because torchrun reports only exit codes."""
