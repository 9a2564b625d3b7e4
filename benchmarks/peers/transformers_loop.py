"""`python -m benchmarks.peers.transformers_loop`: transformers' `generate` on weights that a library has prepared."""

import json
from collections.abc import Callable
from typing import Any

from benchmarks.bare_loop import Moments
from benchmarks.peers.arguments import parse, serve


def main() -> None:
    """Loads, prepares, and decodes as often as it is asked to."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    options = parse(__doc__, tuple(PREPARE))
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    config = AutoConfig.for_model(options.model_type, **json.loads(options.config))
    model = PREPARE[options.weights](AutoModelForCausalLM.from_config(config).eval())
    prompt = torch.randint(config.vocab_size, (1, options.prompt_tokens))
    model.generation_config.eos_token_id = None

    def rate() -> float:
        stream = Moments()
        model.generate(prompt, max_new_tokens=options.new_tokens, do_sample=False, streamer=stream)
        first, last = stream.moments[1], stream.moments[-1]
        return float((options.new_tokens - 1) / (last - first))

    serve(rate, _weight_bytes(model), options.warm_up)


def _weight_bytes(model: Any) -> int:
    """Bytes of all distinct storages that pickling the model would write; packed weights are in its state."""
    import torch

    seen: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            inner = getattr(value, "__tensor_flatten__", None)
            if inner is not None:
                for name in inner()[0]:
                    visit(getattr(value, name))
            elif value.is_quantized or value.layout is torch.strided:
                storage = value.untyped_storage()
                seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, (tuple, list)):
            for item in value:
                visit(item)

    for value in model.state_dict().values():
        visit(value)
    return sum(seen.values())


def _as_linear(model: Any) -> Any:
    """GPT-2's Conv1D as the Linear that the libraries know."""
    import torch
    from transformers.pytorch_utils import Conv1D

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Conv1D):
                linear = torch.nn.Linear(child.nx, child.nf)
                linear.weight = torch.nn.Parameter(child.weight.T.contiguous())
                linear.bias = child.bias
                setattr(parent, name, linear)
    return model


def _dynamic_int8(model: Any) -> Any:
    import torch

    return torch.ao.quantization.quantize_dynamic(_as_linear(model), {torch.nn.Linear}, dtype=torch.qint8)


def _nf4(model: Any) -> Any:
    """Every linear layer but the head, as transformers' own integration does."""
    import torch
    from bitsandbytes.nn import Linear4bit

    for parent in list(_as_linear(model).modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and child is not model.get_output_embeddings():
                layer = Linear4bit(
                    child.in_features, child.out_features, child.bias is not None, torch.float32, True, "nf4"
                )
                layer.load_state_dict(child.state_dict())
                setattr(parent, name, layer.to("cpu"))
    return model


def _torchao_int8(model: Any) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(_as_linear(model), Int8WeightOnlyConfig())
    return model


PREPARE: dict[str, Callable[[Any], Any]] = {
    "float32": lambda model: model,
    "bfloat16": lambda model: model.bfloat16(),
    "dynamic_int8": _dynamic_int8,
    "nf4": _nf4,
    "torchao_int8": _torchao_int8,
}


if __name__ == "__main__":
    main()
