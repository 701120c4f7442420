"""Shards and their index: what is known of a sample without reading it."""
