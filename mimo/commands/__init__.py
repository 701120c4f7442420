"""The commands of the CLI, one file each."""
