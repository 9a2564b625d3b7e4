"""The names that the library has for its methods and layouts."""

from types import SimpleNamespace

METHOD = SimpleNamespace(AWQ="awq")
FORMAT = SimpleNamespace(GEMM="gemm")
