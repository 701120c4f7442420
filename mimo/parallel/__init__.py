"""Which rank does what: grids, levels, padding, process groups."""
