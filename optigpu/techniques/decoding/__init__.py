"""Beyond the four layers: another way to decode. A file or a package for each technique."""
