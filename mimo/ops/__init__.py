"""Parts of layers that know tensors and process groups, but nothing of Megatron."""
