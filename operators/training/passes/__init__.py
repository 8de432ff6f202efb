"""Passes over a step's samples: log-prob passes, value passes and updates, with the loss."""
