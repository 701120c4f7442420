"""Encoders: one file each, found by the name in the recipe (``encoders.<name>.family``).

An encoder file offers

- ``Settings``: a strict pydantic model of the recipe keys under ``encoders.<name>.model``, with
  ``processor(media="image")``, the `data.ItemProcessor` that turns items of that media into
  patches and says how many rows they encode to. `mimo verify` calls ``scaled_down(stages, tp)``,
  the smallest settings of the same character that ``stages`` pipeline stages and ``tp`` ranks
  divide, with a layer of every kind per stage, and checks it by ``layer_kinds()``, one name per
  layer.
- ``check_grid(settings, tp, pp) -> list[str]``: problems of a grid with these sizes, one sentence
  each.
- ``num_levels(settings) -> int``: L, the feature levels that it emits beside the embeddings, 0 for
  most. Level k is added to the hidden states behind the language model's k-th layer (DeepStack).
- ``build(settings, ctx, output_size, seed)``: this rank's stage of the tower with its projector to
  ``output_size``, the language model's hidden size, with freshly drawn weights, the same in every
  layout. ctx: the `ModuleContext` with process groups and dtype. The module offers
  ``set_input_tensor([tensor or None])`` and ``forward(patches, grids)``: patches (P, C) on the
  first pipeline stage, else None; grids (I, 3) as (t, h, w), t·h·w patches of each item. On the
  last stage it returns `bridge.ItemRows`: values (N, (1 + L)·H), the embeddings and then every
  level side by side, under sequence parallelism this rank's part of them, and the rows of every
  item of the lane in the order in which they stand, counted on what it computed: they are compared
  with the plan before anything is sent. Other stages return hidden states for the next one. No
  items at all give rows (0, (1 + L)·H) that are part of the graph. Its ``config`` is Megatron's
  `TransformerConfig`.

A family's tower is an `encoders._tower.Tower`, which does what is parallel about a forward: it
builds its blocks and writes what comes before them (``embed``), beside them (``pack``,
``stack_inputs``) and after them (``project``). `encoders._patches.PatchTower` does more of it for
patches of images. "Patches" are whatever an item consists of, frames of a sound too.

Modules whose names begin with an underscore hold what families share.
"""
