from collections.abc import Mapping
from typing import ClassVar, Literal

from optigpu.techniques.base import CacheOptions, CacheTechnique, Expected


class KvCache(CacheTechnique):
    """Keeps keys and values of earlier tokens, in tensors that grow by concatenation.

    It is the library's default, so that by itself it changes nothing; "alone" it is compared with no_kv_cache.
    """

    summary = "keys and values of earlier tokens are kept, so that a step computes one token"
    citation = "Pope et al., Efficiently Scaling Transformer Inference, 2022, arXiv:2211.05102"
    expected = (
        Expected("arithmetic", "the work of a token stays that of one token, but for attention"),
        Expected(
            "aim", "faster than without a cache, and more so for longer sequences; no change from the default"
        ),
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "no_kv_cache": "one uses a key-value cache and the other disables it",
        "static_kv_cache": "one cache grows, and the other has its full length from the start",
        "torch_compile": "a compiled decode step needs a cache whose shape never changes",
        "export_aot": "an exported decode step needs a cache whose shape never changes",
        "cuda_graphs": "a recorded decode step needs a cache whose shape never changes",
    }
    compared_with = ("no_kv_cache",)
    only_when_asked = True  # The baseline has it already

    name: Literal["kv_cache"] = "kv_cache"

    def cache(self, options: CacheOptions) -> CacheOptions:
        return options.but(kind="dynamic")
