"""One config per experiment; a variant is chosen as `--config=FILE.py:variant`."""
