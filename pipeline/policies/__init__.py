"""Policies: the versions of a run's weights in the store, as files that engines load."""
