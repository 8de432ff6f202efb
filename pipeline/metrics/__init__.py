"""The names of a step's metrics, their meanings and their former names."""
