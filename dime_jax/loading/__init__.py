"""From what a user names to a Denoiser: model directories, conversion into the cache, and how a model is used."""
