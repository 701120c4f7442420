"""Samples from webdataset shards to token ids and image patches. Imports nothing else of ours."""
