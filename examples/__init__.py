"""Small programs that show how to use this package in other training loops."""
