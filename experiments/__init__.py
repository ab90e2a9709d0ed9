"""Experiments: short absl mains over `dime_jax`, one config file each (`python -m experiments.NAME --config=...`)."""
