"""Compares a Hugging Face checkpoint in transformers with the same checkpoint in our layouts."""
