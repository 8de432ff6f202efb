"""The processes that run reward functions, and the trial of a reward function before a run."""
