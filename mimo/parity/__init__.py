"""Compares a Hugging Face checkpoint in transformers with the same checkpoint in a layout of ours.

`samples` makes the inputs, `theirs` and `ours` run them and keep what every module computes,
`compare` compares the two, `report` prints the result.
"""
