"""Experiments: one recipe in several layouts, run side by side and compared."""
