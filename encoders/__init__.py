"""Encoders: one file per family, found by the name in the recipe (``encoders.<name>.family``).

`mimo.families.contracts.EncoderFamily` says what each file must offer.

A family's tower is an `encoders._tower.Tower`, which handles everything parallel about a forward.
The family builds the blocks and writes what comes before them (``embed``), what they take besides
hidden states (``pack``, ``stack_inputs``) and what comes after them (``project``).
`encoders._patches.PatchTower` does some of this for patches of images. "Patches" are whatever an
item consists of, including the frames of a clip.

Modules whose names begin with an underscore hold what families share.
"""
