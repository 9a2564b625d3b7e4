"""How good the saved model is: against n-grams on the same tokens, in int8 against itself, and by what it writes."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from optigpu.techniques.base import Notes
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from tools.bundled_model.baselines import Trigram, Unigram
from tools.bundled_model.text import Tokens, encode
from tools.bundled_model.training import LONG_WINDOW, mean_loss

INT8_TOKENS = 8192
PROMPT = "It was late in the evening when"
SAMPLE_TOKENS = 220
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Score:
    """Losses in nats per token over the same tokens of one text; `size_bytes` is the text's length in UTF-8."""

    tokens: int
    size_bytes: int
    model: float
    unigram: float
    trigram: float

    @property
    def bits_per_byte(self) -> float:
        """The model's loss over all tokens, in bits, for each byte of the text."""
        return self.model * self.tokens / math.log(2) / self.size_bytes


@dataclass(frozen=True)
class Int8Loss:
    """What int8_weight_only costs on held-out tokens: divergence in nats from the fp32 distribution, and top-1."""

    tokens: int
    kld_mean: float
    kld_p99: float
    top1_agreement: float


def load(folder: Path) -> Any:
    """The saved model as fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def score(model: Any, tokenizer: Tokenizer, texts: list[str], train: Tokens) -> Score:
    """All three on the same tokens: the model in windows of its context side by side, the n-grams in one go."""
    tokens = encode(tokenizer, texts)
    return Score(
        tokens=len(tokens) - 1,
        size_bytes=sum(len(text.encode("utf-8")) for text in texts),
        model=mean_loss(model, tokens, LONG_WINDOW),
        unigram=-float(np.log(Unigram(train).probabilities(tokens)).mean()),
        trigram=-float(np.log(Trigram(train).probabilities(tokens)).mean()),
    )


def int8_loss(folder: Path, held_out: Tokens) -> Int8Loss:
    """Compares the model with itself after int8_weight_only, on the first held-out tokens."""
    import torch

    plain, quantized = load(folder), load(folder)
    Int8WeightOnly().modules(quantized, Notes())
    divergences, agreements = [], []
    with torch.inference_mode():
        for start in range(0, min(len(held_out), INT8_TOKENS), LONG_WINDOW):
            row = torch.from_numpy(held_out[start : start + LONG_WINDOW])[None]
            expected, found = (each(row, use_cache=False).logits[0].double() for each in (plain, quantized))
            log_p, log_q = expected.log_softmax(-1), found.log_softmax(-1)
            divergences.append((log_p.exp() * (log_p - log_q)).sum(-1))
            agreements.append(expected.argmax(-1) == found.argmax(-1))
    divergence = torch.cat(divergences)
    return Int8Loss(
        tokens=len(divergence),
        kld_mean=float(divergence.mean()),
        kld_p99=float(divergence.quantile(0.99)),
        top1_agreement=float(torch.cat(agreements).double().mean()),
    )


def sample(model: Any, tokenizer: Tokenizer, seed: int) -> str:
    """What the model writes after PROMPT, drawn at TEMPERATURE."""
    import torch

    torch.manual_seed(seed)
    prompt = torch.from_numpy(encode(tokenizer, [PROMPT])[None, :-1])
    drawn = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=SAMPLE_TOKENS,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        pad_token_id=0,
    )
    text: str = tokenizer.decode(drawn[0].tolist())
    return text
