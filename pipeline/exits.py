"""Exit codes by which workers inform their launcher."""

CONFIGURATION_ERROR = 78
"""A restart would fail again: wrong credentials, a missing bucket, unusable input. The number is
EX_CONFIG of BSD's sysexits.h."""
