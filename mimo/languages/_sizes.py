"""What decoders with grouped queries and a gated MLP have in common: sizes and their checks."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class DecoderSettings(BaseModel):
    """Recipe keys under ``language.model`` that all families have. Numbers of elements."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    ffn_hidden_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_query_groups: int = Field(ge=1)
    head_size: int = Field(ge=2)
    vocab_size: int | None = Field(default=None, ge=1)
    """Tokens that the model knows; as many as the tokenizer has when left out."""
    vocab_multiple: int = Field(default=64, ge=1)
    """The vocabulary is padded to a multiple of this, in every layout alike."""
    norm_eps: float = 1e-6
    init_std: float = Field(default=0.02, gt=0)

    @model_validator(mode="after")
    def _heads_form_groups(self):
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of "
                f"num_query_groups {self.num_query_groups}"
            )
        return self

    def num_tokens(self, tokenizer_size: int) -> int:
        """Tokens that the model knows, with a tokenizer of this many.

        Raises ValueError for a tokenizer with more than ``vocab_size``.
        """
        if self.vocab_size is None:
            return tokenizer_size
        if tokenizer_size > self.vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer_size} tokens, but language.model.vocab_size is "
                f"{self.vocab_size}; use the tokenizer that belongs to the model"
            )
        return self.vocab_size

    def padded_vocab_size(self, num_tokens: int) -> int:
        """Rows of the embedding for a tokenizer of ``num_tokens`` tokens."""
        known = max(num_tokens, self.vocab_size or 0)
        return -(-known // self.vocab_multiple) * self.vocab_multiple

    def flops_per_token(self, vocab_size: int) -> float:
        """Forward and backward FLOPs of one token, attention scores left out (6 per weight)."""
        heads = self.head_size * (2 * self.num_attention_heads + 2 * self.num_query_groups)
        layer = self.hidden_size * (heads + 3 * self.ffn_hidden_size)
        return 6.0 * (self.num_layers * layer + vocab_size * self.hidden_size)


def check_grid(settings: DecoderSettings, tp: int, pp: int, vocab_size: int) -> list[str]:
    """Problems of a grid with these sizes, each one sentence that names the key.

    pp: pipeline stages, virtual ones included.
    """
    problems = []
    for key, size in (
        ("num_attention_heads", settings.num_attention_heads),
        ("ffn_hidden_size", settings.ffn_hidden_size),
        ("vocabulary (padded by vocab_multiple)", vocab_size),
    ):
        if size % tp:
            problems.append(f"language.grid.tp={tp} must divide {key}, which is {size}")
    if settings.num_query_groups % tp and tp % settings.num_query_groups:
        problems.append(
            f"language.grid.tp={tp} must divide num_query_groups, which is "
            f"{settings.num_query_groups}, or be a multiple of it"
        )
    if settings.num_layers % pp:
        problems.append(
            f"language.grid.pp · vpp = {pp} must divide num_layers, which is {settings.num_layers}"
        )
    return problems
