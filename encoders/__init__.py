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
- ``build(settings, ctx, output_size, seed)``: this rank's chunk of the tower with its projector to
  ``output_size``, the language model's hidden size, with freshly drawn weights, the same in every
  layout. ctx: the `ModuleContext` with process groups and dtype. The module offers
  ``set_input_tensor([tensor or None])`` and ``forward(patches, grids)``: patches (P, C) on the
  first pipeline stage, else None; grids (I, 3) as (t, h, w) in patches; rows (N, (1 + L)·H) on
  the last stage, the embeddings and then every level side by side, hidden states for the next
  stage on others. No items at all give rows of that width that are part of the graph. Its
  ``config`` is Megatron's `TransformerConfig`.

Modules whose names begin with an underscore hold what families share.
"""
