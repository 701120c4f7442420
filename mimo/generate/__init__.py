"""The whole model on one rank: answers and their evaluation."""
