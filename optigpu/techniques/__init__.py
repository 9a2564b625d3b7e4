"""The techniques, a module each, in four layers and what goes beyond them.

To add one: write it and name its class in the union below. The request's schema, the command line's choices and the
documentation's table follow from the union.
"""

from typing import Annotated, get_args

from pydantic import Field

from optigpu.techniques.base import Technique
from optigpu.techniques.compilation.cuda_graphs import CudaGraphs
from optigpu.techniques.compilation.export_aot import ExportAot
from optigpu.techniques.compilation.onnx_graph import OnnxGraph
from optigpu.techniques.compilation.tensorflow_xla import TensorflowXla
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.decoding.native_decode import NativeDecode
from optigpu.techniques.decoding.speculative_decoding import SpeculativeDecoding
from optigpu.techniques.kernels.eager_attention import EagerAttention
from optigpu.techniques.kernels.fused_attention import FusedAttention
from optigpu.techniques.kernels.fused_gelu import FusedGelu
from optigpu.techniques.kernels.fused_layernorm import FusedLayernorm
from optigpu.techniques.kernels.fused_qkv import FusedQkv
from optigpu.techniques.kernels.fused_rmsnorm import FusedRmsnorm
from optigpu.techniques.kernels.fused_swiglu import FusedSwiglu
from optigpu.techniques.kernels.llama_flash_attention import LlamaFlashAttention
from optigpu.techniques.memory.autocast import Autocast
from optigpu.techniques.memory.cpu_offload import CpuOffload
from optigpu.techniques.memory.grad_enabled import GradEnabled
from optigpu.techniques.memory.inference_mode import InferenceMode
from optigpu.techniques.memory.int8_kv_cache import Int8KvCache
from optigpu.techniques.memory.kv_cache import KvCache
from optigpu.techniques.memory.llama_kv_cache import LlamaKvCache
from optigpu.techniques.memory.llama_prompt_batch import LlamaPromptBatch
from optigpu.techniques.memory.no_kv_cache import NoKvCache
from optigpu.techniques.memory.openvino_kv_cache import OpenVinoKvCache
from optigpu.techniques.memory.sliding_kv_cache import SlidingKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.awq import Awq
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.fp8 import Fp8
from optigpu.techniques.quantization.fp16 import Fp16
from optigpu.techniques.quantization.gguf import Gguf
from optigpu.techniques.quantization.gptq import Gptq
from optigpu.techniques.quantization.int4_weight_only import Int4WeightOnly
from optigpu.techniques.quantization.int8_dynamic import Int8Dynamic
from optigpu.techniques.quantization.int8_hybrid import Int8Hybrid
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.techniques.quantization.llm_int8 import LlmInt8
from optigpu.techniques.quantization.nf4 import Nf4
from optigpu.techniques.quantization.onnx_int4 import OnnxInt4
from optigpu.techniques.quantization.onnx_int8 import OnnxInt8
from optigpu.techniques.quantization.onnx_static_int8 import OnnxStaticInt8
from optigpu.techniques.quantization.openvino_int4 import OpenVinoInt4
from optigpu.techniques.quantization.openvino_int8 import OpenVinoInt8
from optigpu.techniques.quantization.tf32 import Tf32
from optigpu.techniques.quantization.vllm_bf16 import VllmBf16
from optigpu.techniques.sparsity.magnitude_pruning import MagnitudePruning
from optigpu.techniques.sparsity.smaller_model import SmallerModel
from optigpu.techniques.training.activation_offload import ActivationOffload
from optigpu.techniques.training.chunked_cross_entropy import ChunkedCrossEntropy
from optigpu.techniques.training.compile_training import CompileTraining
from optigpu.techniques.training.fp8_training import Fp8Training
from optigpu.techniques.training.fused_optimizer import FusedOptimizer
from optigpu.techniques.training.gradient_accumulation import GradientAccumulation
from optigpu.techniques.training.gradient_checkpointing import GradientCheckpointing
from optigpu.techniques.training.int8_finetune import Int8Finetune
from optigpu.techniques.training.lora import Lora
from optigpu.techniques.training.mixed_precision import MixedPrecision
from optigpu.techniques.training.optimizer_8bit import Optimizer8bit
from optigpu.techniques.training.optimizer_in_backward import OptimizerInBackward
from optigpu.techniques.training.qlora import Qlora
from optigpu.techniques.training.sequence_packing import SequencePacking

AnyTechnique = Annotated[
    Fp16 | Bf16 | Tf32 | Int8WeightOnly | Int8Dynamic | Int8Hybrid | Int4WeightOnly | LlmInt8 | Nf4
    | Fp8 | Gptq | Awq | Gguf | VllmBf16 | OnnxInt8 | OnnxInt4 | OnnxStaticInt8 | OpenVinoInt8
    | OpenVinoInt4 | EagerAttention | FusedAttention | FusedLayernorm | FusedRmsnorm | FusedGelu
    | FusedSwiglu | FusedQkv | LlamaFlashAttention | InferenceMode | Autocast | GradEnabled | NoKvCache
    | KvCache | StaticKvCache | Int8KvCache | SlidingKvCache | LlamaKvCache | LlamaPromptBatch
    | OpenVinoKvCache | CpuOffload | TorchCompile | CudaGraphs | ExportAot
     | TensorflowXla | OnnxGraph | SpeculativeDecoding | NativeDecode | MagnitudePruning
    | SmallerModel | MixedPrecision | GradientCheckpointing | GradientAccumulation | FusedOptimizer
    | OptimizerInBackward | Optimizer8bit | ChunkedCrossEntropy | ActivationOffload | Lora | Qlora
    | Int8Finetune | CompileTraining | SequencePacking | Fp8Training,
    Field(discriminator="name"),
]  # fmt: skip
"""The union that a request's `stack` is made of; the one list of all techniques."""

TECHNIQUES: dict[str, type[Technique]] = {
    member.model_fields["name"].default: member for member in get_args(get_args(AnyTechnique)[0])
}
"""Every technique's class by its name."""
