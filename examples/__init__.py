"""Small programs that show how to use this package in training loops of one's own."""
