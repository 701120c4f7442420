"""Language model families: one file each, found by the name in the recipe (``language.family``).

A family file offers

- ``Settings``: a strict pydantic model of the recipe keys under ``language.model``. The project
  reads ``hidden_size`` and calls ``padded_vocab_size(num_tokens)``, the rows of the embedding, and
  ``flops_per_token(vocab_size)``, forward and backward. `mimo verify` calls
  ``scaled_down(chunks, tp)``, the smallest settings of the same character that ``chunks`` chunks
  (of all pipeline stages) and ``tp`` ranks divide, with a layer of every kind per chunk, and
  checks it by ``layer_kinds()``, one name per layer.
- ``ITEM_RULES``: the `mimo.families.item_rules.ItemRules` that say what is special about tokens of
  items.
- ``check_grid(settings, tp, pp, vocab_size) -> list[str]``: problems of a grid with these sizes,
  one sentence each; pp counts the chunks of all stages, vocab_size is padded.
- ``build(settings, ctx, num_tokens, max_sequence_length, seed)``: this rank's chunk as a Megatron
  `GPTModel` with freshly drawn weights, the same in every layout. ctx: the `ModuleContext` with
  process groups, dtype and chunk; it is called once per chunk. num_tokens: of the tokenizer; the
  family pads, and padding must take no part in the loss.

Modules whose names begin with an underscore hold what families share.
"""
