"""Is it a denoiser, is it asked in its own terms, is it still the same one? Asked before any verdict."""
