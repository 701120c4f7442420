"""Generators: one file per family, found by its name; the contract is `GeneratorFamily`.

Modules whose names begin with an underscore hold what families share.
"""
