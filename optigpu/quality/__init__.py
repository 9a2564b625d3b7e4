"""Quality: texts, and how far a model's predictions of them are from those of its fp32 self. Loads no torch."""
