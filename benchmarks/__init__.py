"""Measurements against named baselines; not part of the installed package."""
