"""Plans of models of transformers, as its Trainer and those of TRL train them."""
