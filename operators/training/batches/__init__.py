"""Micro-batches of a sealed step: each rank's samples, and the positions of tokens and routes."""
