"""A barrier for all programs of a persistent kernel, in two halves: a program says that it has done its part, does what
needs nobody else's, such as asking for weights, and then waits for the others.

    ticket = arrive(arrivals, program, programs)
    ...
    wait(arrivals, ticket)

`arrivals` is an int32 that is 0 before the first launch and never needs to be reset: the arrivals of a round add 2^31
together, so that its highest bit turns with the last of them, and only then. A program cannot be a round ahead, since
it arrives in each. All programs must run at once, or those that run wait forever for the others: the kernel is launched
as a cooperative one, which a GPU refuses otherwise.

What a program has stored before it arrives is what others load after they have waited: the barrier inside a program
puts all its threads' stores before the arrival, which releases them to the whole GPU, and the wait acquires them.
"""

import triton
import triton.language as tl

HIGHEST_BIT = tl.constexpr(-(2**31))


@triton.jit
def arrive(arrivals, program, programs):
    """The ticket to wait with. The first program adds what the others lack of 2^31."""
    tl.debug_barrier()
    added = tl.where(program == 0, (1 - programs) ^ HIGHEST_BIT, 1)
    return tl.atomic_add(arrivals, added, sem="release", scope="gpu")


@triton.jit
def passed(arrivals, ticket):
    """Whether all programs have arrived since the ticket was given."""
    return (tl.atomic_add(arrivals, 0, sem="acquire", scope="gpu") ^ ticket) < 0


@triton.jit
def wait(arrivals, ticket):
    """Until all programs have arrived."""
    while not passed(arrivals, ticket):
        pass
    tl.debug_barrier()
