"""The names of a step's metrics: what each means, and what it was called before."""
