"""Shared by tests: tiny models and tokenizers, references written from the papers, fake servers and engines."""
