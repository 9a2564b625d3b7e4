"""Where a job's time went."""

from optigpu.vocabulary import Frozen


class Span(Frozen):
    """What a replicate of a variant did, or the job as a whole (`index` null), and for how long.

    It began `began_s` seconds after the job's request was read. `seconds` are of the wall clock; what was done in turns
    with others counts its own turns alone. `cpu_s` are the CPU seconds of the job's processes meanwhile, without
    those of programs that they started (compilers); 0 where the system does not count them.
    """

    index: int | None
    replicate: int
    doing: str
    began_s: float
    seconds: float
    cpu_s: float
