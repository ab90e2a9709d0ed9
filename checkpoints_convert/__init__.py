"""Convert checkpoints of PyTorch diffusion models to dime_jax model directories, without PyTorch.

Run it with `python -m checkpoints_convert --source FILE_OR_DIR --output DIR`.
"""
