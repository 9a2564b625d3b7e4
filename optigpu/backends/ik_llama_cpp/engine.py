"""ik_llama.cpp as the runtime of GGUF files asks for it, and how files are quantized.

The package ik-llama-cpp-python 0.1.5 leaves that part of the C interface out.
"""

import ctypes
import re
from pathlib import Path

from optigpu.backends.llama_cpp.engine import Engine, converter, sources
from optigpu.backends.llama_cpp.gguf_facts import ExactCaches
from optigpu.backends.llama_cpp.gguf_families import LAYER_NORM
from optigpu.backends.llama_cpp.library import Library


def _open() -> Library:
    from optigpu.backends.ik_llama_cpp.native import IkLlamaCpp  # imports ik_llama.cpp

    return IkLlamaCpp()


IK_LLAMA_CPP = Engine(
    name="ik_llama_cpp",
    package="ik-llama-cpp-python",
    open=_open,
    quantizer=converter(
        "gguf",
        "ik-llama-cpp-python",
        program="optigpu.backends.ik_llama_cpp.native",
        sources=(*sources("library"), Path(__file__), Path(__file__).with_name("native.py")),
    ),
    refused={
        LAYER_NORM: "ik_llama.cpp ends on an assertion in a LayerNorm (GPT-2's), and would end the process with it; "
        "ask for the backend llama_cpp, or for a model with RMSNorm, such as a Llama."
    },
    # Flash attention ends on an assertion with keys or values of float32, and values of float32 need it.
    exact=ExactCaches(plain=("F32", "F16"), fused=("F16", "F16")),
)

FILE_TYPES = {
    "F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7,
    "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15,
    "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18,
    "IQ3_S": 26, "IQ3_M": 27, "IQ4_NL": 25, "IQ4_XS": 30,
    "IQ2_K": 138, "IQ3_K": 139, "IQ4_K": 140, "IQ5_K": 141, "IQ6_K": 142,
    "IQ4_KS": 145, "IQ4_KSS": 148, "IQ5_KS": 150, "IQ4_KT": 153,
    "Q4_0_R8": 202, "Q5_0_R4": 208, "Q8_0_R8": 207, "Q4_K_R4": 214, "Q5_K_R4": 216, "Q6_K_R4": 218,
    "Q8_K_R8": 399, "IQ4_NL_R4": 225, "IQ4_XS_R8": 230, "IQ4_K_R4": 340, "IQ5_K_R4": 341,
    "IQ4_KS_R4": 345, "IQ5_KS_R4": 350,
}  # fmt: skip
"""llama_ftype of llama.h, by the types' names here."""
TENSOR_TYPES = (
    "output_tensor_type", "token_embedding_type", "attn_q_type", "attn_k_type", "attn_v_type", "attn_qkv_type",
    "attn_output_type", "ffn_gate_type", "ffn_down_type", "ffn_up_type", "ffn_gate_inp_type",
)  # fmt: skip
"""Members that replace the type of some matrices; a number that no type has leaves it."""
ROWS_OF = {"Q8_K_R8": "Q8_0"}
"""The type of rows that are looked up one by one, where it is not the interleaved type's name without its end."""
_MIXTURE = re.compile(r"(Q\d_K)_[SML]")
_MIXTURES = {"IQ3_M": "IQ3_S"}
_SPARE = 256
"""Bytes behind the structure, for a library whose own is longer: it writes its defaults there."""


def of_tensors(kind: str) -> str:
    """The type of most matrices of a file: a mixture's name has S, M or L behind it."""
    mixture = _MIXTURE.fullmatch(kind)
    return mixture[1] if mixture else _MIXTURES.get(kind, kind)


class QuantizeParameters(ctypes.Structure):
    """llama_model_quantize_params of llama.h."""

    _fields_ = [
        ("nthread", ctypes.c_int32),
        ("ftype", ctypes.c_int),
        *((name, ctypes.c_int) for name in TENSOR_TYPES),
        ("allow_requantize", ctypes.c_bool),
        ("quantize_output_tensor", ctypes.c_bool),
        ("only_copy", ctypes.c_bool),
        ("pure", ctypes.c_bool),
        ("keep_split", ctypes.c_bool),
        ("ignore_imatrix_rules", ctypes.c_bool),
        ("only_repack", ctypes.c_bool),
        ("dry_run", ctypes.c_bool),
        ("partial_requant", ctypes.c_bool),
        ("imatrix", ctypes.c_void_p),
        ("kv_overrides", ctypes.c_void_p),
        ("custom_quants", ctypes.c_void_p),
        ("repack_pattern", ctypes.c_void_p),
        ("spare", ctypes.c_char * _SPARE),
    ]
