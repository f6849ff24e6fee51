"""Recovery and search in the trainers of other packages."""
