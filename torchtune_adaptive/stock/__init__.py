"""torchtune 0.6.1: its recipes and configs, loaded and mended."""
