"""Layer training: what a step of training is made of. A module or a package for each technique."""
