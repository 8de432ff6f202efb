"""The checks of `retrace doctor`: whether this machine or pod meets the requirements of a run."""
