"""Comparisons of a layout with one rank, of our models with transformers, of a step with itself."""
