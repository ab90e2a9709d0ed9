"""Halves, calibration, frozen rules and evaluation: the one protocol that audits, stages and studies run."""
