"""Programs that show the toolkit at work; not part of the installed package."""
