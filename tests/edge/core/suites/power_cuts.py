"""The queue through a power cut at every byte that it writes: at most the record that was being written is lost."""

from esp32_agent.core.queue import Queue
from tests.edge.core.suites.check import equal
from tests.edge.core.suites.machine import PowerCut, Storage
from tests.edge.core.suites.queue import drained, numbers, record

CAP = 512


class Story:
    """What was promised to the queue's user until the power was cut."""

    def __init__(self):
        self.promised = []  # append returned True
        self.acknowledged = []
        self.attempted = None  # the record that was being written


def _tell(queue, story, steps, size):
    """Appends a record per step, and acknowledges two after every third."""
    for number in range(steps):
        story.attempted = number
        assert queue.append(record(number, size))
        story.promised.append(number)
        story.attempted = None
        if number % 3 == 2:
            batch = queue.batch(2, 1000)
            story.acknowledged += numbers(batch)  # the service has them, whatever comes of the position
            queue.acknowledge(len(batch))


def _after_cut(budget, tears, steps=9, size=40, cap=CAP):
    """Whether the power was cut after so many bytes; checks what is left then."""
    storage, story = Storage(), Story()
    storage.budget, storage.tears = budget, tears
    try:
        _tell(Queue(storage, cap), story, steps, size)
        was_cut = False
    except PowerCut:
        was_cut = True
    storage.budget = None
    queue = Queue(storage, cap)
    dropped = queue.dropped
    left = drained(queue)
    wanted = [number for number in story.promised if number not in story.acknowledged]
    # Nothing that waits is lost, nothing is out of order, nothing was made up.
    equal(left, sorted(left))
    assert set(wanted) <= set(left), (budget, wanted, left)
    written = set(story.promised)
    written.add(story.attempted)
    assert set(left) <= written, (budget, left)
    assert dropped <= (1 if story.attempted is not None else 0), (budget, dropped)
    assert queue.append(record(77))
    equal(drained(Queue(storage, cap)), [77])
    return was_cut


def _each_cut(tears, **story):
    budget = 0
    while _after_cut(budget, tears, **story):
        budget += 1
    return budget


def test_a_cut_at_every_byte_of_log_and_position():
    assert _each_cut(False, cap=65536) > 490


def test_a_cut_at_every_byte_on_a_medium_that_tears_the_position():
    assert _each_cut(True, cap=65536) > 490


def test_a_cut_at_every_byte_while_the_log_is_copied():
    assert _each_cut(False, steps=12, size=50) > 900


def test_a_cut_at_every_byte_while_the_log_is_copied_on_a_medium_that_tears():
    assert _each_cut(True, steps=12, size=50) > 900


def test_a_second_cut_while_recovering_from_the_first():
    for first in range(60, 260, 9):
        for second in range(0, 40, 3):
            storage, story = Storage(), Story()
            _until_cut(storage, first, _story, storage, story)
            _until_cut(storage, second, Queue, storage, CAP)
            wanted = [number for number in story.promised if number not in story.acknowledged]
            assert set(wanted) <= set(drained(Queue(storage, CAP)))


def _story(storage, story):
    _tell(Queue(storage, CAP), story, 9, 40)


def _until_cut(storage, budget, action, *arguments):
    storage.budget = budget
    try:
        action(*arguments)
    except PowerCut:
        return
    finally:
        storage.budget = None


def test_cuts_with_a_cap_drop_only_the_oldest_and_count_them():
    for budget in range(700, 1600, 7):
        storage = Storage()
        storage.budget, promised, attempted = budget, 0, 0
        try:
            queue = Queue(storage, CAP)
            for number in range(40):
                attempted = number + 1
                queue.append(record(number))
                promised = number + 1
        except PowerCut:
            pass
        storage.budget = None
        queue = Queue(storage, CAP)
        dropped, left = queue.dropped, drained(queue)
        equal(left, list(range(left[0], left[-1] + 1)))
        assert left[-1] + 1 in (promised, attempted)
        assert left[0] <= dropped <= left[0] + 1, (budget, left, dropped)
