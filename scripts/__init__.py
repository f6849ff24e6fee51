"""What keeps the repository in order, run by hand or by CI."""
