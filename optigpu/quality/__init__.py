"""Quality: texts, and how far predictions diverge from those of the fp32 model."""
