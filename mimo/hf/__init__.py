"""Checkpoints in Hugging Face format: read into any layout, and written from any checkpoint.

`keymap` says what our parameters consist of, `folder` reads a checkpoint's folder, `architectures`
knows the models, `recipe_keys` fills a recipe from a folder, `initial` checks it against a recipe,
`load` puts its weights into a rank's modules, `convert` is the command line's. `tiny` writes small
checkpoints with random weights.
"""
