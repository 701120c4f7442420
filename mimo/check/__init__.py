"""Comparisons: a layout with one rank, our model with transformers, a step with itself."""
