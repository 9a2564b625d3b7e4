"""Files with kernels as people bring them: honest ones, wrong ones, and exploits that were published against other
benchmarks (KernelBench's and GPU MODE's), written for this engine."""

HEAD = """
import gc, os, sys, threading, time
import torch

INPUTS = [((64, 384), (384, 384))]


def reference(x, weight):
    return torch.softmax(x @ weight, dim=-1)

"""
HONEST = (
    HEAD
    + """
def custom(x, weight):
    return torch.nn.functional.linear(x, weight.t()).softmax(-1)
"""
)
WRONG = {
    "cached by address": (
        """
KEPT = {}
def custom(x, weight):
    if x.data_ptr() not in KEPT:
        KEPT[x.data_ptr()] = reference(x, weight)
    return KEPT[x.data_ptr()]
""",
        "is off by",
    ),
    "the first answer": (
        """
KEPT = []
def custom(x, weight):
    KEPT.append(reference(x, weight)) if not KEPT else None
    return KEPT[0]
""",
        "is off by",
    ),
    "one buffer for all answers": (
        """
OUT = torch.empty(64, 384)
def custom(x, weight):
    threading.Timer(0.05, lambda: OUT.copy_(reference(x, weight))).start()
    return OUT
""",
        "Wrong answers",
    ),
    "zeros": ("def custom(x, weight):\n    return torch.zeros(64, 384)\n", "is off by 0.9"),
    "memory as it was": ("def custom(x, weight):\n    return torch.empty(64, 384)\n", "Wrong answers"),
    "NaN as a wildcard": (
        "def custom(x, weight):\n    return torch.full((64, 384), float('nan'))\n",
        "NaN, infinite",
    ),
    "changes what the reference is given": (
        """
def custom(x, weight):
    x.zero_()
    weight.zero_()
    return torch.full((64, 384), 1 / 384)
""",
        "is off by",
    ),
    "in place": (
        "def custom(x, weight):\n    y = reference(x, weight)\n    x.add_(1)\n    return y\n",
        "changed its tensor 0",
    ),
    "replaces torch functions of the reference": (
        """
torch.softmax = lambda *given, **named: torch.zeros(64, 384)
torch.Tensor.__matmul__ = lambda x, weight: torch.zeros(64, 384)
def custom(x, weight):
    return torch.zeros(64, 384)
""",
        "is off by 0.9",
    ),
    "replaces comparisons": (
        """
import numpy
yes = lambda *given, **named: True
torch.allclose = torch.equal = torch.testing.assert_close = numpy.allclose = numpy.array_equal = yes
def custom(x, weight):
    return torch.zeros(64, 384)
""",
        "is off by 0.9",
    ),
    "looks for the answer in the process": (
        """
def custom(x, weight):
    frame, found = sys._getframe(1), []
    while frame:
        found += [each for each in frame.f_locals.values() if isinstance(each, torch.Tensor)]
        frame = frame.f_back
    found += [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    fits = [each for each in found if each.shape == (64, 384) and each is not x]
    return fits[0].clone() if fits else torch.empty(64, 384)
""",
        "Wrong answers",
    ),
    "half precision": (
        "def custom(x, weight):\n    return reference(x.bfloat16(), weight.bfloat16()).float()\n",
        "and at most 0.0001 is allowed",
    ),
    "computed when it is read": (
        """
class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, given=(), named=None):
        return torch.zeros(64, 384)
def custom(x, weight):
    return torch.empty(64, 384).as_subclass(Lazy)
""",
        "custom returned a Lazy; it must return a plain tensor",
    ),
    "another number of outputs": (
        "def custom(x, weight):\n    return reference(x, weight), x\n",
        "it returned 2 tensors (float32 [64, 384]; float32 [64, 384]), and the reference 1 tensor",
    ),
    "another dtype": (
        "def custom(x, weight):\n    return reference(x, weight).double()\n",
        "it returned 1 tensor (float64 [64, 384]), and the reference 1 tensor (float32 [64, 384])",
    ),
    "no tensor": ("def custom(x, weight):\n    return None\n", "custom returned a NoneType"),
    "raises": ("def custom(x, weight):\n    raise ValueError('not today')\n", "ValueError: not today"),
    "ends the process": (
        "def custom(x, weight):\n    os._exit(0)\n",
        "ended with status 0 before it answered",
    ),
    "ends while it is imported": (
        "def custom(x, weight): ...\nsys.exit(3)\n",
        "The kernel's file cannot be imported: SystemExit: 3",
    ),
    "takes all memory": (
        "def custom(x, weight):\n    return [torch.empty(2**30, dtype=torch.uint8) for _ in range(2**14)]\n",
        "There was not enough memory",
    ),
}
"""Their code after HEAD, and words of the sentence that each ends with: there is no result."""

KEEPS = """
KEPT = {}
def key(x):
    return tuple(x.flatten()[:4].tolist())
def custom(x, weight):
    if key(x) not in KEPT:
        for given in sys._getframe(1).f_locals["self"]._sets:
            KEPT[key(given[0])] = slow(*given)
    return KEPT[key(x)]
"""
SLOW = """
def slow(x, weight):
    for _ in range(8):
        y = reference(x, weight)
    return y
"""
"""As if it took long: what is deferred, hidden or kept is then more than noise."""
FALSE = {
    "cached by content": (SLOW + KEEPS, "is said to take"),
    "works only where it is checked": (
        SLOW
        + """
def custom(x, weight):
    checked = sys._getframe(1).f_code.co_name == "answer"
    return slow(x, weight) if checked else x
""",
        "is said to take",
    ),
    "a slower clock": (
        SLOW
        + """
seconds, nanoseconds = time.perf_counter, time.perf_counter_ns
time.perf_counter = lambda: seconds() / 50
time.perf_counter_ns = lambda: nanoseconds() // 50
custom = slow
""",
        "neither messages nor other processes explain",
    ),
    "makes up its times, and hides that": (
        SLOW
        + """
kernels, harness = sys.modules["optigpu.backends.torch.kernels"], sys.modules["optigpu.child.harness"]
kernels.TorchKernel.seconds = lambda self, calls: 1e-6 * calls
harness.Harness.replaced = lambda self: ()
custom = slow
""",
        "is said to take",
    ),
    "computes while its inputs are drawn": (
        SLOW
        + """
KEPT = {}
def custom(x, weight):
    return KEPT.get(x.data_ptr(), x)
kernels, harness = sys.modules["optigpu.backends.torch.kernels"], sys.modules["optigpu.child.harness"]
draw = kernels.TorchKernel.draw
def early(self, seed, calls):
    found = draw(self, seed, calls)
    KEPT.update((given[0].data_ptr(), slow(*given)) for given in self._sets[:found])
    return found
kernels.TorchKernel.draw = early
harness.Harness.replaced = lambda self: ()
""",
        "is said to take",
    ),
    "a lazy tensor, and a check that lets it pass": (
        SLOW
        + """
class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, given=(), named=None):
        with torch._C.DisableTorchFunctionSubclass():
            given = [slow(*each.inputs) if isinstance(each, Lazy) else each for each in given]
            return function(*given, **(named or {}))
def custom(x, weight):
    y = torch.empty(64, 384).as_subclass(Lazy)
    y.inputs = x, weight
    return y
kernels = sys.modules["optigpu.backends.torch.kernels"]
kernels.TorchKernel._plain = lambda self, found: [found]
part, lazy = kernels._part, kernels.AnswerPart(dtype="float32", shape=(64, 384))
kernels._part = lambda each: lazy if isinstance(each, Lazy) else part(each)
""",
        "is said to take",
    ),
    "a thread that goes on after the clock": (
        SLOW
        + """
def custom(x, weight):
    if sys._getframe(1).f_code.co_name != "answer":
        return x
    y = torch.empty(64, 384)
    late = threading.Thread(target=lambda: y.copy_(slow(x, weight)))
    late.start()
    kernels.TorchKernel._keep = lambda self, *given: (late.join(), keep(self, *given))[1]
    return y
kernels = sys.modules["optigpu.backends.torch.kernels"]
keep = kernels.TorchKernel._keep
""",
        "is said to take",
    ),
}
"""Their answers are right where they are read, and their times are not: the result is not valid."""
