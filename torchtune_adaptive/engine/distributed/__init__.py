"""What ranks agree on, and which collectives they issue."""
