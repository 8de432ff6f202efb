"""Exit codes of workers that a launcher understands."""

CONFIGURATION_ERROR = 78
"""Starting again would fail again: wrong credentials, a missing bucket, unusable input. The number
is EX_CONFIG of BSD's sysexits.h."""
