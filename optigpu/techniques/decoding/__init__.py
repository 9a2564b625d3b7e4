"""Beyond the four layers: another way to decode. A module or a package for each technique."""
