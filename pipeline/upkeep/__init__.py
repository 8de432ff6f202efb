"""Upkeep of stored runs: listing, verification, statistics, export, pruning and removal."""
