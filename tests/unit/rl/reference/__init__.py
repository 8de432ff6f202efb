"""The algorithms written from their papers, sample by sample in double precision.

Nothing here knows the package's functions: `tests/unit/rl/test_papers_*.py` compare the two.
"""
