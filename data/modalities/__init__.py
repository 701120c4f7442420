"""Kinds of items: how their files become patches and rows."""
