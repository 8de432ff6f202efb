"""The full offline check of stored runs and recorded sets.

`whole` asks the others: `sealed_steps` about each step, `stored_run` about all else.
"""

from pipeline.upkeep.verify.whole import verify

__all__ = ["verify"]
