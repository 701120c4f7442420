"""Parts of layers that know tensors and process groups, and nothing of Megatron."""
