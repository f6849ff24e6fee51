"""Recovery inside the trainers of other packages, each of which is imported by its own module only."""
