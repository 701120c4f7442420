"""Pages about runs: one run, or several beside each other."""
