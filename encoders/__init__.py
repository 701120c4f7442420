"""Encoders: one file per family, found by the name in the recipe (``encoders.<name>.family``).

What a file offers is said by `mimo.families.contracts.EncoderFamily`.
"""
