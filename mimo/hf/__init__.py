"""Checkpoints in Hugging Face format: read into any layout, and written from any checkpoint.

`keymap` says what our parameters consist of, `architectures` which models there are, `recipe_keys`
fills a recipe from a folder, `load` puts weights into a rank's modules, `from_hf` and `to_hf` turn
one kind of checkpoint into the other. `tiny` makes small ones to try all that.
"""
