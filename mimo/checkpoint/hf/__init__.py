"""Import from and export to Hugging Face format."""
