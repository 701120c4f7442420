"""Measurements of the parts that promise speed; each is one command that checks its bounds."""
