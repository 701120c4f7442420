"""Measurements of the parts that promise speed, each one command that judges its own bounds."""
