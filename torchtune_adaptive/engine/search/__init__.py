"""The largest size that fits."""
