"""A run in the object store: the names of its objects, its commits, plans, policies and attempts.

`keys` owns the names. Commit objects (*.json) have computable names; `commit` creates and reads
them, `wait` waits for them.
"""
