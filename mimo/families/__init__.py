"""What a family of models is to the rest, and how one is found by its name."""
