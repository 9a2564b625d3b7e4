"""Beyond the four layers: fewer weights. One file for each technique."""
