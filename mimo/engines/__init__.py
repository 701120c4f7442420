"""Engines: what builds and runs a module on its grid."""
