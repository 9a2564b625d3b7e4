"""Beyond the four layers: another way to decode. One file for each technique."""
