"""The largest step and sample that can be stored."""

MOST_SAMPLES = 1 << 20
"""Samples of a step's plan, whose ids are held in memory wherever it is compared."""
MOST_SHARDS = 100_000
"""Shards of a step, whose keys have five digits."""
MOST_TOKENS = 1 << 21
"""Tokens of a sample that is written."""
