"""The version of this package, and nothing else: setup.py reads it too."""

__version__ = "0.1.0"
