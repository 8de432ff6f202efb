"""Exit codes and lines of a log by which workers inform their launcher."""

CONFIGURATION_ERROR = 78
"""A restart would fail again (LastingError): wrong credentials, a missing bucket, unusable input, a
reward function that raises. The number is EX_CONFIG of BSD's sysexits.h."""

RANK_FAILED = "rank %s failed: %s"
"""The message of the log's line by which a training rank says what ended it, at level ERROR: its
number, and the error. torchrun reports exit codes alone."""
