"""Prefect flows and tasks: they plan, seal and watch; they move no tensors."""
