"""Manifests for tests, made without a conversion."""

from typing import Any

from optigpu.documents.manifest import ModelManifest

OPERATORS = [
    {"name": "CONV_2D", "count": 35, "macs": 9_074_304},
    {"name": "DEPTHWISE_CONV_2D", "count": 17, "macs": 1_579_824},
    {"name": "FULLY_CONNECTED", "count": 1, "macs": 12_800},
    {"name": "MEAN", "count": 1, "macs": 0},
]


def document(**changed: Any) -> dict[str, Any]:
    """MobileNetV2 of width 0.35 at 96x96, as JSON, with some fields changed."""
    return {
        "schema": 1,
        "sha256": "ab" * 32,
        "network": {"family": "mobilenet_v2", "alpha": "0.35", "input": [96, 96, 3], "classes": 10},
        "model_bytes": 646_136,
        "operators": OPERATORS,
        "macs": 10_666_928,
        "parameter_bytes": 415_912,
        "arena_bytes": 210_288,
        "input": {"shape": [1, 96, 96, 3], "dtype": "int8", "scale": 0.00784, "zero_point": -1},
        "output": {"shape": [1, 10], "dtype": "int8", "scale": 0.00390625, "zero_point": -128},
        "agreement": {"samples": 32, "top1": 0.97, "kld_mean": 0.002},
        "calibration": {"kind": "images", "samples": 100},
        "rankable": True,
        "golden": {"count": 2, "inputs_sha256": "cd" * 32, "outputs": ["00" * 10, "7f" * 10]},
        "tools": {"tensorflow-cpu": "2.21.0"},
    } | changed


def manifest(**changed: Any) -> ModelManifest:
    return ModelManifest.model_validate(document(**changed))
