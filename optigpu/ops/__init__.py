"""Hand-written kernels behind plain functions, in a folder for each kind of operator.

linear/: layers with quantized weights. four_bits/: their quantization to 4-bit numbers and scales. norm/: norms with
the residual's addition before them. activation/: activations with the bias before them. decode/: decoders as data, and
the operators that run whole decode steps. rates/: loops that show how fast a CPU is.

Each is C++ on a CPU with a compiler, Triton or torch's own operators on CUDA, and plain torch elsewhere. A kernel has
its source, a Python file with its functions, and its check in the folder's selftest.py (kernel_check.py); Triton's are
in files triton_*.py with examples of their launches (launch.py). This file itself imports nothing.
"""
