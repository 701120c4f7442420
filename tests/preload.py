"""Compile the name patterns of transformers once, in the fork server of tests."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

# The first call compiles hundreds of patterns and keeps them, in half a second.
get_checkpoint_conversion_mapping("llama")
