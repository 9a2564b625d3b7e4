from typing import Literal

from optigpu.techniques.base import CacheTechnique, EngineOptions, Expected, OnCpuEngine, Trial


class OpenVinoKvCache(OnCpuEngine, CacheTechnique):
    """Keeps keys and values as 8-bit numbers with a scale and an offset for each token and head, or as halves.

    By itself weights and products stay in float32; with quantized weights OpenVINO chooses a cache of its own, which
    this replaces.
    """

    backends = ("openvino",)
    summary = "OpenVINO's keys and values in 8 or 16 bits"
    citation = "OpenVINO documentation, Key-value cache quantization on CPUs, 2024"
    expected = (Expected("arithmetic", "about a quarter of a float32 cache in u8, and half of it in f16"),)
    error_bound = 0.1
    trials = (Trial(), Trial({"numbers": "f16"}))

    name: Literal["openvino_kv_cache"] = "openvino_kv_cache"
    numbers: Literal["u8", "f16"] = "u8"

    def engine(self, options: EngineOptions) -> EngineOptions:
        return options.but(cache=self.numbers)
