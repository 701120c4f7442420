"""Chats as tokens: messages, templates, placeholders, label masks."""
