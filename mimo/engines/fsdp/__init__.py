"""Modules of transformers, unmodified, under FSDP2 and tensor parallelism by DTensor."""
