"""Estimates of a run's memory, from config.json and settings, before anything starts."""
