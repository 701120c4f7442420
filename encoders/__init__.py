"""Encoders: one file per family, found by the name in the recipe (``encoders.<name>.family``).

What a file offers is said by `mimo.families.contracts.EncoderFamily`.

A family's tower is an `encoders._tower.Tower`, which does what is parallel about a forward: it
builds its blocks and writes what comes before them (``embed``), beside them (``pack``,
``stack_inputs``) and after them (``project``). `encoders._patches.PatchTower` does more of it for
patches of images. "Patches" are whatever an item consists of, frames of a clip too.

Modules whose names begin with an underscore hold what families share.
"""
