"""Is the model a denoiser, is it asked in its own terms, and is it still the same one? Checked before any verdict."""
