"""Recipes that ship with the project: YAML files, read as package data and never imported."""
