"""A run in the object store: the names of its objects, its commits, plans and attempts.

`keys` defines the names. Readers can compute the name of a commit object (*.json) without listing
the store. `commit` creates and reads commits, and `wait` waits for them.
"""
