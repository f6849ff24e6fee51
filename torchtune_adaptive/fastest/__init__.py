"""Which settings of a config train fastest, among those that leave the training as it is."""
