"""`mimo verify`: any layout takes the same steps as one rank, or the first difference is named."""
