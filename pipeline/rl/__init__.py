"""Reinforcement learning as pure functions on arrays: advantages, losses, rewards, metrics."""
