"""How kernels add up to a table and to shares of a request's time."""

from optigpu.documents.roofline import Bound
from optigpu.hardware.kernel_shares import Kernel, share, table

MEMORY, COMPUTE = Bound.MEMORY, Bound.COMPUTE


def test_shares_and_table_weigh_each_kernel_by_what_it_stands_for() -> None:
    kernels = [
        Kernel("first", 3.0, COMPUTE, weight=1, in_steps=False),
        Kernel("step", 1.0, MEMORY, weight=5, in_steps=True),
        Kernel("step", 1.0, MEMORY, weight=5, in_steps=True),
        Kernel("new", 2.0, None, weight=1, in_steps=False),
    ]
    assert [share(kernels, bound) for bound in (COMPUTE, MEMORY, None)] == [3 / 15, 10 / 15, 2 / 15]
    rows = table(kernels)
    assert [row["name"] for row in rows] == ["step", "first", "new"]
    assert rows[0] == {"name": "step", "calls": 2, "self_s": 2.0, "share": 10 / 15, "bound": MEMORY}
