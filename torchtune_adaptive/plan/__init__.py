"""What fits, known without a device: ``tune-adaptive plan`` and ``tune-adaptive calibrate``."""
