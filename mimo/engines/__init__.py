"""What runs a module."""
