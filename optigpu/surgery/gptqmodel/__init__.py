"""4-bit layers from GPTQ and AWQ checkpoints, and quantization by GPTQModel in a separate process."""
