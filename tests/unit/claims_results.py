"""Results, rows and reports made up for the tests of claims: the figures were never measured by anything."""

import json
from typing import Any

from optigpu.claims.matching import from_results, measured_for
from optigpu.claims.model import baselines
from tests.unit.made_results import ATTRIBUTION, RESULTS, metric

BOOK = baselines()
T4 = "1x Tesla T4 15 GiB"
RTX_3090 = "1x NVIDIA GeForce RTX 3090 24 GiB"
RTX_4090 = "1x NVIDIA GeForce RTX 4090 24 GiB"


def a_result(
    value: float | None = 161.2,
    *,
    hardware: str = T4,
    stack: tuple[str | dict[str, Any], ...] = ("int8_weight_only", "torch_compile"),
    name: str = "tokens_per_s",
    valid: bool = True,
    text: str | None = None,
    **variant: Any,
) -> dict[str, Any]:
    """A result document with one figure."""
    result = json.loads(json.dumps(RESULTS[0]))
    result["metrics"] = {
        name: metric(name, value, None if value is None else (0.9 * value, 1.1 * value)).model_dump()
    }
    result["environment"]["hardware_class"] = hardware
    result["verdict"] |= {"valid": valid}
    techniques = [{"name": each} if isinstance(each, str) else each for each in stack]
    label = " + ".join(technique["name"] for technique in techniques) or "baseline"
    result["variant"] |= {"label": label, "stack": techniques} | variant
    if text is not None:
        result["facts"]["quality"] = {"text": text}
    found: dict[str, Any] = result
    return found


def found_for(claim_id: str, *results: dict[str, Any]) -> float | None:
    """The figure that a claim finds among results."""
    found = measured_for(BOOK.claim(claim_id), from_results(results), BOOK)
    return found.value if found else None


def a_report(ratio: float, ci: tuple[float, float] | None = None, hardware: str = T4) -> dict[str, Any]:
    """A job whose best variant gained that much."""
    attribution = ATTRIBUTION.model_dump(mode="json")
    attribution["rows"][1]["speedup"] |= {"ratio": ratio, "ci": ci}
    return {"spec": {}, "results": [a_result(hardware=hardware)], "attribution": attribution}
