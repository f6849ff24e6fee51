"""Predict what fits without a GPU: ``tune-adaptive plan`` and ``tune-adaptive calibrate``."""
