"""What a device holds, how much of it at most, and when it is out of memory."""
