"""Plan a job before it starts: memory of its ranks, time of its steps, and the best layout."""
