"""What a device holds."""
