"""The algorithms, implemented from their papers, one sample at a time in double precision.

These modules do not use the functions under test; `tests/unit/rl/test_papers_*.py` compare their
results with those of the functions.
"""
