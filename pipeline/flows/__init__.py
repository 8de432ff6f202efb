"""Prefect flows and tasks. They plan and seal steps and watch workers, but do not move tensors."""
