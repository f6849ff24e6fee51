"""torchtune 0.6.1: load its recipes and configs, with fixes."""
