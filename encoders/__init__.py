"""Encoders: one file per family, found by its name; the contract is `EncoderFamily`.

`encoders._tower.Tower` says what a tower writes itself. Modules whose names begin with an
underscore hold what families share.
"""
