"""Handwritten and spoken digits as small data sets of chats, without a download."""
