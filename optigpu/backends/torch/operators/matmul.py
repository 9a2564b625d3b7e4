"""Square matrix products."""

from collections.abc import Sequence

import torch

from optigpu.backends.operators import MatmulBlock
from optigpu.backends.torch.device import TorchDevice
from optigpu.backends.torch.operators.base import TorchOperator, dtype_of, wide


class TorchMatmul(TorchOperator):
    """C = A B, each product written over the last."""

    def __init__(self, place: TorchDevice, size: int, dtype: str) -> None:
        """`dtype` tf32 is float32 that NVIDIA's tensor cores round."""
        super().__init__(place)
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
        storage = torch.float32 if dtype == "tf32" else dtype_of(dtype)
        self._a, self._b = (self.normal(size, size, dtype=storage) for _ in range(2))
        self._c = torch.empty_like(self._a)

    def call(self) -> None:
        """One product."""
        torch.mm(self._a, self._b, out=self._c)

    def held(self) -> Sequence[torch.Tensor]:
        """Both operands and the product."""
        return self._a, self._b, self._c

    def drawn(self) -> Sequence[torch.Tensor]:
        """Both operands."""
        return self._a, self._b

    def block(self, places: Sequence[int]) -> MatmulBlock:
        """These rows and columns of the last product, and what they are the product of."""
        at = torch.tensor(places, device=self._a.device)
        return MatmulBlock(wide(self._a[at]), wide(self._b[:, at]), wide(self._c[at][:, at]))
