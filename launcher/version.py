"""The version, in a module of its own so that packaging can read it without imports."""

__version__ = "0.1.0"
