"""Encoders: one file per family, found by the name in the recipe (``encoders.<name>.family``).

`mimo.families.contracts.EncoderFamily` says what each file must offer, `encoders._tower.Tower` what
a tower writes itself. "Patches" are whatever an item consists of, including the frames of a clip.
Modules whose names begin with an underscore hold what families share.
"""
