"""Checkpoints in Hugging Face format: read into any layout, and written from any checkpoint.

`architectures` says which models there are, `recipes` fills a recipe from a folder, `folder`
and `checkpoint` read tensors, `export_config` writes configurations, `tiny` makes small checkpoints
to try all of it. What a parameter consists of is in `mimo.families.keymap`.
"""
