"""Watches this process for people and tools: metrics over HTTP, and records for `chaos`.

Nothing of it is imported, and no thread runs, unless the environment asks for it.
"""
