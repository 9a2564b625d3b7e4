"""OpenVINO's package, without the message over the network that it sends at every import."""

import sys
from types import ModuleType
from typing import cast

# What has no such module sends nothing; NNCF asks for the same one.
sys.modules.setdefault("openvino_telemetry", cast(ModuleType, None))

import openvino as ov  # noqa: E402
from openvino import opset13 as ops  # noqa: E402
from openvino._offline_transformations import apply_make_stateful_transformation  # noqa: E402

__all__ = ["apply_make_stateful_transformation", "ops", "ov"]
