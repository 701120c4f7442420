"""Ranks: processes of this machine, or found in the environment of torchrun or srun."""
