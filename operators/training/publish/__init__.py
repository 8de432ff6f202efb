"""Publishes policies: all ranks write the model's weights to the store, in the background."""
