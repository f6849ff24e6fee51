"""What ranks agree on, and how they survive one rank's out-of-memory error together."""
