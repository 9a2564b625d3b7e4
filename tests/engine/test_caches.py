"""Our own key-value caches against references in float64 that are written apart from them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from optigpu.backends.torch.decoding import DecodeStep
from optigpu.backends.torch.kv_caches import (
    cache_facts,
    dequantize_tokens,
    new_cache,
    quantize_tokens,
    require_cacheable,
)
from optigpu.models.loading.load import loaded_facts
from optigpu.techniques.base import CacheOptions
from optigpu.vocabulary import UnsupportedError
from tests.breadth import spread
from tests.engine.rounding import in_float64
from tests.engine.tiny_models import FAMILIES, VOCABULARY, prompt, tiny_model

STEPS = 12
EXACT = 1e-9
"""What two orders of the same float64 sums may differ by in a logit, with room to spare; int8 rounding is 1e-3."""
WINDOWS = [(4, 2), (5, 0), (1, 3)]
KINDS = ["dynamic", "static"]
SHAPES = [(1, 1, 1, 1), (2, 3, 5, 7), (1, 2, 9, 64), (3, 1, 4, 33)]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return in_float64(tiny_model(request.param))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_states_are_the_nearest_multiples_of_their_scale(shape: tuple[int, ...]) -> None:
    states = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    q, scale = quantize_tokens(states)
    assert (q.dtype, q.shape, scale.dtype, scale.shape) == (
        torch.int8,
        states.shape,
        torch.float32,
        (*shape[:3], 1),
    )
    assert np.array_equal(dequantize_tokens(q, scale, torch.float32).numpy(), rounded(states.numpy()))
    off = (q.double() * scale.double() - states.double()).abs()
    assert bool((off <= 0.5 * scale.double() * (1 + 2**-20)).all())
    assert bool((q.abs().amax(dim=-1) == 127).all())


@pytest.mark.parametrize("kind", KINDS)
def test_an_int8_cache_attends_to_what_it_stores(model: Any, kind: Any) -> None:
    expected = decoded(model, rounding_cache(model))
    assert difference(decoded(model, cache_of(model, kind, int8=True)), expected) <= EXACT
    assert difference(decoded(model, cache_of(model, kind)), expected) > 1e-4, "int8 makes no difference here"


@pytest.mark.parametrize(
    ("kind", "window", "sinks", "prompt_tokens"), spread(KINDS, WINDOWS, [1, 3, 8], by_default=3)
)
def test_a_window_attends_to_the_first_tokens_and_the_last(
    model: Any, kind: Any, window: int, sinks: int, prompt_tokens: int
) -> None:
    found = decoded(model, cache_of(model, kind, window=window, sinks=sinks), (prompt_tokens,))
    expected = masked(model, attended((prompt_tokens,), window, sinks), prompt_tokens)
    assert difference(found, expected) <= EXACT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("int8", "window"), [(True, None), (True, 4), (False, 4)])
def test_the_bytes_are_those_of_the_tokens_that_are_kept(
    model: Any, kind: Any, int8: bool, window: int | None
) -> None:
    """No storage is larger than what is kept of it: a view would hold the tensor that it was cut from."""
    facts = loaded_facts(model)
    cache = cache_of(model, kind, int8=int8, window=window, sinks=2 if window else 0)
    decoded(model, cache)
    tokens = 6 if window else 8 + STEPS
    told = cache_facts(cache.layers[0].options, facts)
    plain_bytes = 2 * facts.layers * facts.kv_heads * facts.head_size * 8
    token_bytes = told["kv_cache_bytes_per_token"] if int8 else plain_bytes
    assert held_bytes(cache) == 2 * tokens * token_bytes
    assert told.get("kv_cache_tokens", tokens) == tokens
    if int8:
        assert token_bytes / (plain_bytes / 2) == (facts.head_size + 4) / (4 * facts.head_size)


def cache_of(model: Any, kind: Any, **options: Any) -> Any:
    return new_cache(model, CacheOptions(kind=kind, **options), 8 + STEPS)


def tokens_of(length: int) -> Any:
    return prompt(2, 8 + STEPS)[:, :length]


def decoded(model: Any, cache: Any, chunks: tuple[int, ...] = (8,)) -> Any:
    """Logits [batch, ..., vocabulary] after each chunk and after each token behind them, 8 + STEPS tokens in all."""
    step, begin, found = DecodeStep(model), 0, []
    with torch.no_grad():
        for length in chunks:
            ids = tokens_of(begin + length)[:, begin:]
            found.append(model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1:])
            begin += length
        return torch.cat([*found, step_through(step, cache, begin)], dim=1)


def step_through(step: DecodeStep, cache: Any, begin: int) -> Any:
    with torch.no_grad():
        logits = [
            step(tokens_of(index + 1)[:, index:], torch.tensor([[index]]), cache)[1]
            for index in range(begin, 8 + STEPS)
        ]
    return torch.stack(logits, dim=1)


def attended(chunks: tuple[int, ...], window: int, sinks: int) -> Any:
    """Which tokens each one attends to, [length, length], worked out token by token."""
    length = 8 + STEPS
    mask = torch.zeros(length, length, dtype=torch.bool)
    kept: list[int] = []
    begin = 0
    for size in (*chunks, *[1] * (length - sum(chunks))):
        seen = [*kept, *range(begin, begin + size)]
        after = [token for token in seen if token < sinks or token >= begin + size - window]
        for token in range(begin, begin + size):
            visible = after if size == 1 else [other for other in seen if other <= token]
            mask[token, visible] = True
        begin, kept = begin + size, after
    return mask


def masked(model: Any, mask: Any, first: int, cache: Any = None) -> Any:
    """Logits from the last of `first` tokens on, by one pass with an explicit mask."""
    length = mask.shape[0]
    with torch.no_grad():
        logits = model(
            input_ids=tokens_of(length),
            position_ids=torch.arange(length)[None],
            attention_mask=mask.expand(2, 1, length, length),
            past_key_values=cache,
            use_cache=cache is not None,
        ).logits
    return logits[:, first - 1 :]


def rounding_cache(model: Any) -> Any:
    """The library's cache, but that what comes in is rounded before."""
    cache: Any = DynamicCache(config=model.config)
    for layer in cache.layers:
        layer.update = rounded_first(layer.update)
    return cache


def rounded_first(update: Callable[..., Any]) -> Callable[..., Any]:
    def rounding(keys: Any, values: Any, *args: Any) -> Any:
        return update(*(torch.from_numpy(rounded(states.numpy())) for states in (keys, values)))

    return rounding


def rounded(states: Any) -> Any:
    """Rounds to int8 and back, in numpy."""
    narrow = states.astype(np.float32)
    scale = np.abs(narrow).max(axis=-1, keepdims=True) / np.float32(127)
    return (np.rint(narrow / scale) * scale).astype(states.dtype)


def held_bytes(cache: Any) -> int:
    """Bytes of the storages behind the cache."""
    return sum(part.untyped_storage().nbytes() for layer in cache.layers for part in layer.parts)


def difference(one: Any, other: Any) -> float:
    return float((one - other).abs().max())


@pytest.mark.parametrize(
    ("family", "shapes", "said"),
    [
        (
            "gpt_neo",
            {
                "num_layers": 2,
                "num_heads": 4,
                "attention_types": [[["global", "local"], 1]],
                "window_size": 2000,
            },
            "unfit",
        ),
        ("falcon", {"num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}, "does not run"),
    ],
    ids=["gpt_neo", "falcon"],
)
def test_a_static_cache_is_refused_where_it_would_change_the_model(
    family: str, shapes: dict[str, Any], said: str
) -> None:
    model = of_family(family, shapes)
    require_cacheable(model, CacheOptions())
    for options in (CacheOptions(kind="static"), CacheOptions(kind="static", window=8)):
        with pytest.raises(UnsupportedError, match=f"{said}.* static cache.* leave out static_kv_cache"):
            require_cacheable(model, options)


def of_family(family: str, shapes: dict[str, Any], attention: str | None = None) -> Any:
    """A model with larger random weights than usual, so that its attention matters."""
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, hidden_size=64, **shapes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    for parameter in model.requires_grad_(False).parameters():
        parameter.mul_(5 if parameter.dim() > 1 else 1)
    return model
