"""OptiGPU: what each optimization layer buys on your hardware, alone and stacked."""

__version__ = "0.1.0"
