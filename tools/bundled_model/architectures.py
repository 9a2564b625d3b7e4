"""The bundled models before they are trained: what each is, and how it is made with random weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.bundled_model.text import VOCABULARY

CONTEXT = 512
END = 0
"""The token that ends a text."""


@dataclass(frozen=True)
class Architecture:
    """A model to train. `family` and `described` are words of its card.

    `build` makes it in float32 with weights from torch's current seed, given its dropout. `settings` are of the saved
    configuration, where that says another thing than the one that trains.
    """

    family: str
    described: str
    build: Callable[[float], Any]
    dropout: float = 0.0
    settings: Mapping[str, str] = field(default_factory=dict)


def _gpt2(dropout: float) -> Any:
    """Its gelu is torch's fused one, which is the function that the saved configuration calls gelu_new."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=256,
        n_layer=4,
        n_head=4,
        activation_function="gelu_pytorch_tanh",
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        attn_pdrop=0.0,
        bos_token_id=END,
        eos_token_id=END,
    )
    return GPT2LMHeadModel(config)


def _llama(*, tied: bool) -> Any:
    """Widths are multiples of 256, which the blocks of GGUF's types hold."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        bos_token_id=END,
        eos_token_id=END,
    )
    return LlamaForCausalLM(config)


_SMALL = (
    f"LlamaForCausalLM: width 256, 6 layers, 4 heads that share 2 heads of keys and values, SwiGLU of width 768, "
    f"context {CONTEXT}"
)
ARCHITECTURES: dict[str, Architecture] = {
    "tiny": Architecture(
        family="GPT-2",
        described=f"GPT2LMHeadModel: width 256, 4 layers, 4 heads, context {CONTEXT}, tied head",
        build=_gpt2,
        dropout=0.1,
        settings={"activation_function": "gelu_new"},
    ),
    "small": Architecture(
        family="Llama",
        described=f"{_SMALL}, tied head",
        build=lambda _: _llama(tied=True),
    ),
    "small-untied": Architecture(
        family="Llama",
        described=f"{_SMALL}, a head of its own",
        build=lambda _: _llama(tied=False),
    ),
}
"""The bundled models by name, and one that is made for comparison alone. A Llama has no dropout."""
