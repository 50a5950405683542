"""Job script templates, found by importlib.resources."""
