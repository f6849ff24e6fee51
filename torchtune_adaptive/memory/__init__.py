"""Measure and limit a device's memory, and recognise out-of-memory errors."""
