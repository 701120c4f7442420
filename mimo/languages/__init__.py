"""Language model families: one file each, found by the name in the recipe.

A family file offers

- ``Settings``: a strict pydantic model of the recipe keys under ``language.model``;
- ``build(settings, ctx, seed)``: this rank's chunk as a Megatron `GPTModel`.
"""
