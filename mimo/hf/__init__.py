"""Checkpoints in Hugging Face format."""
