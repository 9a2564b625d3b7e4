"""The other names that people import the library by, and the code that is written for them, on a model that is here."""

from typing import Any

import torch
from cuda_optimizer import CUDAKernelOptimizer
from gpu_poor import make_it_work_hybrid, quantize
from gpu_poor.examples import demo
from gpu_profiler import GPUProfiler
from quantized_linear import QuantizedLinear
from transformers import AutoModelForCausalLM, AutoTokenizer

import optigpu
from optigpu.facade import production_demo
from optigpu.models.reference import BUNDLED


def test_they_are_the_library_s_own() -> None:
    assert (quantize, make_it_work_hybrid) == (optigpu.quantize, optigpu.make_it_work_hybrid)
    assert (GPUProfiler, CUDAKernelOptimizer) == (optigpu.GPUProfiler, optigpu.CUDAKernelOptimizer)
    assert QuantizedLinear is optigpu.QuantizedLinear
    assert demo.demo_production_ready is production_demo.demo_production_ready


def test_one_line_quantization_as_it_is_shown() -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(BUNDLED["tiny"])
    tokenizer: Any = AutoTokenizer.from_pretrained(BUNDLED["tiny"])
    model = quantize(model)
    tokenizer.pad_token = tokenizer.eos_token
    output = model.generate(tokenizer("The future of AI is", return_tensors="pt")["input_ids"], max_length=50)
    text = tokenizer.decode(output[0], skip_special_tokens=True)
    assert text.startswith("The future of AI is")
    assert output.shape[1] <= 50


def test_profiling_planning_and_a_quantized_layer_as_they_are_shown() -> None:
    model, input_tensor, weights = torch.nn.Linear(64, 32), torch.randn(4, 64), torch.randn(32, 64)
    profiler = GPUProfiler(gpu_model="A100")
    result = profiler.profile_model_forward(model, input_tensor, "FP16")
    cuda_opt = CUDAKernelOptimizer(gpu_model="A100")
    cuda_opt.print_optimization_summary()
    linear_q = QuantizedLinear(64, 32)
    linear_q.quantize_weights(weights)
    output = linear_q(input_tensor)
    assert result.precision == "FP16"
    assert output.shape == (4, 32)
