"""Benchmarks: what the trace store and replay cost, beside others in the same run.

`make bench` runs them all; docs/performance.md holds results and what they leave out.
"""
