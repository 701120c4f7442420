"""Families of models: their contracts, key maps and configurations, found by name."""
