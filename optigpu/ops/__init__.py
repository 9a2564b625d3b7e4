"""Hand-written kernels behind plain functions, in a folder for each kind of operator.

linear/: layers with int8 weights (`int8_linear`), with int8 activations as well (`int8_dynamic`), and with 4-bit
weights in groups (`int4_linear`). four_bits/: quantization of weights to 4-bit numbers and scales. norm/: norms with
the residual's addition before them. activation/: activations with the bias before them. decode/: decoders as data, and
the operators that run whole decode steps. rates/: loops that show how fast a CPU is.

Each is C++ on a CPU with a compiler, Triton or torch's own operators on CUDA, and plain torch elsewhere. To add a
kernel: write its source and a Python file with its functions, which callers import, and its check in the folder's
selftest.py (kernel_check.py). A file of Triton kernels is called triton_*.py and has examples of their launches
(kernel.py), which are compiled for every GPU without one. This file itself imports nothing.
"""
