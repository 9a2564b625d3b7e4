"""Quality: the texts, and the divergence of predictions from those of the fp32 model."""
