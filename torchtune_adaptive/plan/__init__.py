"""Predict what fits without a GPU: ``tune-adaptive plan``."""
