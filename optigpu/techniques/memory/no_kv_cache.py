from typing import Literal

from optigpu.techniques.base import CacheOptions, CacheTechnique, Expected


class NoKvCache(CacheTechnique):
    """Decodes without a key-value cache: the whole sequence is run for each token."""

    summary = "decodes without a cache: the whole sequence again for each token"
    citation = "Pope et al., Efficiently Scaling Transformer Inference, 2022, arXiv:2211.05102"
    expected = (
        Expected("arithmetic", "the work of a token grows with its position"),
        Expected("aim", "slower, and more so for longer sequences"),
    )
    cautionary = True

    name: Literal["no_kv_cache"] = "no_kv_cache"

    def cache(self, options: CacheOptions) -> CacheOptions:
        return options.but(kind="none")
