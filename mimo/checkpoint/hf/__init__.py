"""From a checkpoint in Hugging Face format to one of ours, and back."""
