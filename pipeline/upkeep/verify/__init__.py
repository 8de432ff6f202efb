"""The full offline check of stored runs and recorded sets.

The module `whole` calls `sealed_steps` for each step, `chains` for the policies, and `stored_run`
for the remaining objects.
"""

from pipeline.upkeep.verify.whole import verify

__all__ = ["verify"]
