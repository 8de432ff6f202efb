"""The location of the repository, for tests that read its files or run its programs."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
