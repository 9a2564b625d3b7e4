"""Beyond the four layers: fewer weights. A file or a package for each technique."""
