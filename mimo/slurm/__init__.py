"""Jobs on a cluster: which rank on which node, batch scripts, preflight, and watching a run."""
