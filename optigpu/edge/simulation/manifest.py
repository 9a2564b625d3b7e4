"""The manifest of the simulated model, so that a service knows it; its reports rank nowhere all the same."""

import hashlib

from optigpu.edge.simulation.documents import SimulatedModel

MACS = 100_000
PARAMETER_BYTES = 10_000


def manifest_of(model: SimulatedModel) -> dict[str, object]:
    """The document as `optigpu convert` writes one; it says that it is not rankable."""
    inputs = b"".join(map(bytes.fromhex, model.golden_inputs))
    return {
        "schema": 1,
        "sha256": model.sha256,
        "network": {"family": "file", "input": [model.input_bytes], "classes": model.output_bytes},
        "model_bytes": 2 * PARAMETER_BYTES,
        "operators": [{"name": "FULLY_CONNECTED", "count": 1, "macs": MACS}],
        "macs": MACS,
        "parameter_bytes": PARAMETER_BYTES,
        "arena_bytes": 40_000,
        "input": _tensor(model.input_bytes),
        "output": _tensor(model.output_bytes),
        "agreement": {"samples": 0, "reason": "The model is simulated."},
        "calibration": {"kind": "random", "samples": 1},
        "rankable": False,
        "golden": {
            "count": len(model.golden_outputs),
            "inputs_sha256": hashlib.sha256(inputs).hexdigest(),
            "outputs": list(model.golden_outputs),
        },
        "tools": {"optigpu device-sim": "1"},
    }


def _tensor(size: int) -> dict[str, object]:
    return {"shape": [1, size], "dtype": "int8", "scale": 1.0, "zero_point": 0}
