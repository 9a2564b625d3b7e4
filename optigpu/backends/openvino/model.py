"""A model that OpenVINO has compiled for a CPU, and the sequences that it decodes."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from optigpu.backends.openvino.contents import GRAPH
from optigpu.backends.openvino.library import ov
from optigpu.backends.openvino.settings import DTYPES
from optigpu.backends.runtime import Ids, Logits
from optigpu.hardware.cpu import has_vnni
from optigpu.vocabulary import OptiGPUError

_DEVICE = "CPU"
_ATTENTION = "ScaledDotProductAttention"
"""The operator that computes attention, and appends to the cache where it is state."""
_SHARED = "undef"
"""The kernel of a layer that takes an earlier layer's."""


class OpenVinoModel:
    """A compiled model. `shape` fixes that of its one input, for an image classifier."""

    def __init__(
        self, folder: Path, properties: Mapping[str, str], shape: tuple[int, ...] | None = None
    ) -> None:
        """Raises RuntimeError when OpenVINO cannot read or compile it."""
        core = ov.Core()
        model = core.read_model(folder / GRAPH)
        if shape is not None:
            model.reshape(ov.PartialShape(list(shape)))
        self._compiled = core.compile_model(model, _DEVICE, dict(properties))
        self.cpu = str(core.get_property(_DEVICE, "FULL_DEVICE_NAME"))
        self.capabilities = [str(each) for each in core.get_property(_DEVICE, "OPTIMIZATION_CAPABILITIES")]

    @property
    def threads(self) -> int:
        """Those that OpenVINO took."""
        return int(str(self._compiled.get_property("INFERENCE_NUM_THREADS")))

    @property
    def dtype(self) -> str:
        """What floats are multiplied in."""
        return _dtype(self._compiled.get_property("INFERENCE_PRECISION_HINT"))

    @property
    def cache_dtype(self) -> str:
        """What keys and values are kept in."""
        return _dtype(self._compiled.get_property("KV_CACHE_PRECISION"))

    @property
    def dynamic_group(self) -> int:
        """How many activations share a scale where products are of int8; 0 where they are of floats.

        Without VNNI OpenVINO multiplies floats, whatever group it is asked for.
        """
        if not has_vnni():
            return 0
        return int(str(self._compiled.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE")))

    @property
    def attention(self) -> tuple[str, ...]:
        """The operators of the compiled graph that compute attention, with the kernels that OpenVINO names for them."""
        found = set()
        for node in self._compiled.get_runtime_model().get_ops():
            said = node.get_rt_info()
            kind = str(said["layerType"].astype(str)) if "layerType" in said else ""
            kernel = str(said["primitiveType"].astype(str)) if kind == _ATTENTION else _SHARED
            if not kernel.startswith(_SHARED):
                found.add(f"{kind} {kernel}")
        return tuple(sorted(found))

    def request(self) -> ov.InferRequest:
        """A request with state of its own."""
        return self._compiled.create_infer_request()


class Sequences:
    """`rows` sequences of at most `length` tokens that are decoded together; their keys and values are OpenVINO's."""

    def __init__(self, model: OpenVinoModel, rows: int, length: int) -> None:
        self.rows, self.length = rows, length
        self._request = model.request()
        self._order = np.arange(rows, dtype=np.int32)
        self._used = 0

    def begin(self) -> None:
        """Forgets the sequences."""
        self._used = 0
        self._request.reset_state()

    def forward(self, tokens: Ids) -> Logits:
        """Appends `tokens` [rows, count]. Logits after the last token of each, in OpenVINO's memory until a next call.

        Raises OptiGPUError when the sequences would become longer than they may.
        """
        rows, count = tokens.shape
        end = self._used + count
        if rows != self.rows or end > self.length:
            raise OptiGPUError(
                f"These are {self.rows} sequences of {self.length} tokens; {rows} sequences of {end} tokens do not fit."
            )
        positions = np.broadcast_to(np.arange(self._used, end), (rows, count))
        given = {
            "input_ids": np.ascontiguousarray(tokens),
            "attention_mask": np.ones((rows, end), np.int64),
            "position_ids": np.ascontiguousarray(positions),
            "beam_idx": self._order,
        }
        self._request.infer(given, share_inputs=True, share_outputs=True)
        self._used = end
        logits: Logits = self._request.get_output_tensor(0).data[:, -1]
        return logits

    def close(self) -> None:
        """Gives the request back, and its keys and values with it."""
        del self._request


def _dtype(name: object) -> str:
    """Of OpenVINO's type, as text or as its own class: <Type: 'float32'>, "f32"."""
    said = name.get_type_name() if isinstance(name, ov.Type) else str(name)
    return DTYPES.get(said, said)
