"""Data sets in other layouts, packed into shards."""
