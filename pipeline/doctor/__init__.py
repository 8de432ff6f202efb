"""What `retrace doctor` looks at: whether this machine or pod can do what a run asks of it."""
