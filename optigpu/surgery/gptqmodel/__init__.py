"""4-bit layers out of GPTQ and AWQ checkpoints, and quantizing with GPTQModel in a process of its own."""
