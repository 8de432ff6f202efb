"""Limits on the steps and samples that can be stored."""

MOST_SAMPLES = 1 << 20
"""Maximum number of samples in a step's plan. The limit exists because processes that compare
samples with a plan keep all of the plan's sample ids in memory."""
MOST_SHARDS = 100_000
"""Maximum number of shards in a step. The keys of shards contain the shard's number in five
digits."""
MOST_TOKENS = 1 << 21
"""Maximum number of tokens in a newly written sample."""
