"""Encoders: one file each, found by the name in the recipe (``encoders.<name>.family``).

An encoder file offers

- ``Settings``: a strict pydantic model of the recipe keys under ``encoders.<name>.model``,
  with ``processor()``, how an item becomes numbers (and how many rows it encodes to);
- ``build(settings, ctx, output_size, seed)``: the tower and its projector to the language
  model's hidden size, as a module whose ``forward(patches, grids)`` returns rows (N, H).
"""
