from typing import Literal

from pydantic import Field

from optigpu.surgery.extras import KEEPS_A_CACHE
from optigpu.techniques.base import CacheOptions, CacheTechnique, Expected


class SlidingKvCache(CacheTechnique):
    """Keeps the keys and values of the first `sinks` tokens and of the last `window` ones, the current one included.

    A prompt attends to itself completely, however long it is; tokens outside of the window are dropped after it. From
    then on a token attends to what is kept. Positions stay those of the sequence, where the paper counts them within
    the cache, so that a model cannot decode past the length that it was made for.
    """

    summary = "only the keys and values of the first and the last tokens are kept"
    citation = "Xiao et al., StreamingLLM, 2023, arXiv:2309.17453"
    expected = (
        Expected(
            "arithmetic",
            "memory and time per token stop growing at the window; the model forgets the tokens between",
        ),
    )
    conflicts = KEEPS_A_CACHE

    approximates = True
    only_when_asked = True  # It forgets tokens, and whether that matters depends on the use

    name: Literal["sliding_kv_cache"] = "sliding_kv_cache"
    window: int = Field(1020, ge=1, le=2**20)
    sinks: int = Field(4, ge=0, le=2**20)

    def cache(self, options: CacheOptions) -> CacheOptions:
        return options.but(window=self.window, sinks=self.sinks)
