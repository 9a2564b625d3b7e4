"""Functions and modules of torch that people import; `optigpu.exports` lists them. Each file is imported at the first
use of a name in it, and so may import torch at its top."""
