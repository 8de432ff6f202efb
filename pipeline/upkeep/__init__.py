"""Upkeep of stored runs: verify, measure, export and prune them, and sweep debris."""
