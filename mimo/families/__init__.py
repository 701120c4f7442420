"""What a family of models offers the other packages, and how one is found by its name."""
