"""Checkpoints: their folder, what is saved, where a run starts."""
