"""no_kv_cache: a cautionary rung that computes every earlier token again."""

from typing import ClassVar, Literal

from optigpu.techniques.base import Basis, CacheOptions, Expected, Phase, Technique
from optigpu.vocabulary import Layer


class NoKvCache(Technique):
    """Decodes without a key-value cache: the whole sequence is run for each token."""

    layer: ClassVar[Layer] = Layer.MEMORY
    phase: ClassVar[Phase] = Phase.CACHE
    summary: ClassVar[str] = "decodes without a cache: the whole sequence again for each token"
    citation: ClassVar[str] = "Pope et al., Efficiently Scaling Transformer Inference, 2022, arXiv:2211.05102"
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(
            Basis.ARITHMETIC,
            "the work of a token grows with its position",
        ),
        Expected(
            Basis.AIM,
            "slower, and more so for longer sequences",
        ),
    )
    cautionary: ClassVar[bool] = True

    name: Literal["no_kv_cache"] = "no_kv_cache"

    def cache(self, options: CacheOptions) -> CacheOptions:
        """No cache."""
        return options.but(kind="none")
