"""Training: the loop, one step, metrics."""
