"""Beyond the four layers: fewer weights. A module or a package for each technique."""
