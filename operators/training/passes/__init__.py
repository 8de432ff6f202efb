"""Passes over a step's samples: log-prob passes, updates, and the loss."""
