"""The command line: each command reads its options and calls the package that does the work."""
