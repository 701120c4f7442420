"""The modules of a rank: building them, rows in place, partition, loss."""
