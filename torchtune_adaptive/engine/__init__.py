"""What any PyTorch loop can use: memory, what ranks agree on, recovery, search. It imports torch alone."""
