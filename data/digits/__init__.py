"""The example data: scans of handwritten digits as chats."""
