"""Micro-batches of a sealed step: the ranks' samples, and the positions of tokens and routes."""
