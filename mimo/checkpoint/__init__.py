"""Checkpoints: folder, saving, loading, resuming, and Hugging Face import and export."""
