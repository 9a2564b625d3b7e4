"""The queue: order, acknowledgement, the cap, a full medium, damage, and a power cut at every byte that it writes."""

from esp32_agent.core.queue import FRAME, HEADER, Queue
from tests.edge.core.suites.machine import PowerCut, Storage, equal


def record(number, size=40):
    return (f"{number:06d}" + "." * (size - 6)).encode()


def numbers(records):
    return [int(each[:6]) for each in records]


def drained(queue):
    """All records that wait, in order; they are acknowledged."""
    found = []
    while True:
        batch = queue.batch(3, 1000)
        if not batch:
            return found
        found += numbers(batch)
        queue.acknowledge(len(batch))


def filled(storage, count, cap=65536):
    queue = Queue(storage, cap)
    for number in range(count):
        assert queue.append(record(number))
    return queue


def test_records_come_out_in_the_order_in_which_they_went_in():
    queue = filled(Storage(), 10)
    equal(queue.depth, 10)
    equal(drained(queue), list(range(10)))
    equal((queue.depth, queue.dropped), (0, 0))


def test_what_was_not_acknowledged_is_there_after_a_reboot():
    storage = Storage()
    queue = filled(storage, 10)
    equal(numbers(queue.batch(4, 1000)), [0, 1, 2, 3])
    queue.acknowledge(3)
    queue = Queue(storage)
    equal(queue.depth, 7)
    equal(drained(queue), [3, 4, 5, 6, 7, 8, 9])
    equal(drained(Queue(storage)), [])


def test_a_rejected_record_is_counted_and_the_next_one_follows():
    storage = Storage()
    queue = filled(storage, 3)
    queue.batch(3, 1000)
    queue.reject()
    queue = Queue(storage)
    equal((queue.depth, queue.rejected, queue.dropped), (2, 1, 0))
    equal(drained(queue), [1, 2])


def test_above_the_cap_the_oldest_are_dropped_and_counted():
    storage = Storage()
    queue = filled(storage, 100, cap=1024)
    left = drained(Queue(storage, 1024))
    equal(left, list(range(100 - len(left), 100)))
    equal(queue.dropped, 100 - len(left))
    assert 12 <= len(left) <= 21
    assert storage.size("queue.a") + storage.size("queue.b") <= 1024


def test_acknowledged_records_make_room_before_anything_is_dropped():
    queue, seen = Queue(Storage(), 1024), []
    for number in range(200):
        assert queue.append(record(number))
        if number % 5 == 4:
            seen += numbers(queue.batch(5, 1000))
            queue.acknowledge(5)
    equal((seen, queue.dropped), (list(range(200)), 0))


def test_a_full_medium_drops_the_new_record_and_keeps_the_others():
    for room in range(1, FRAME + 40):
        storage = Storage()
        queue = filled(storage, 5)
        storage.capacity = storage.used() + room
        equal(queue.append(record(5)), False)
        equal((queue.depth, queue.dropped), (5, 1))
        storage.capacity = None
        assert queue.append(record(6))
        equal((drained(queue if room % 2 else Queue(storage))), [0, 1, 2, 3, 4, 6])


def test_a_full_medium_while_the_log_is_copied_loses_nothing_that_waits():
    for room in range(0, 900, 50):
        storage = Storage()
        queue = filled(storage, 20, cap=1024)
        queue.batch(20, 10000)
        queue.acknowledge(10)
        storage.capacity = storage.used() + room
        kept = [number for number in (20, 21, 22) if queue.append(record(number))]
        equal(queue.dropped, 3 - len(kept))
        assert not (storage.size("queue.a") and storage.size("queue.b"))
        storage.capacity = None
        equal(drained(Queue(storage, 1024)), list(range(10, 20)) + kept)


def test_a_position_that_cannot_be_written_only_repeats():
    storage = Storage()
    queue = filled(storage, 4)
    storage.capacity = 0
    queue.batch(2, 1000)
    queue.acknowledge(2)
    equal(numbers(queue.batch(9, 1000)), [2, 3])
    storage.capacity = None
    equal(drained(Queue(storage)), [0, 1, 2, 3])


def test_a_flipped_bit_costs_one_record_wherever_it_is():
    size = HEADER + 3 * (FRAME + 40)
    for place in range(size):
        storage = Storage()
        filled(storage, 3)
        name = "queue.a" if storage.size("queue.a") else "queue.b"
        storage.files[name][place] ^= 1 << (place % 8)
        queue = Queue(storage)
        left = drained(queue)
        hit = (place - HEADER) // (FRAME + 40) if place >= HEADER else -1
        equal((left, queue.dropped), ([n for n in range(3) if n != hit], 1 if hit >= 0 else 0))


def test_damage_after_the_start_is_found_when_the_record_is_read():
    storage = Storage()
    queue = filled(storage, 4)
    name = "queue.a" if storage.size("queue.a") else "queue.b"
    storage.files[name][HEADER + FRAME + 40 + FRAME + 7] ^= 4
    equal(numbers(queue.batch(9, 1000)), [0])
    queue.acknowledge(1)
    equal(numbers(queue.batch(9, 1000)), [2, 3])
    equal((queue.depth, queue.dropped), (2, 1))
    storage.files[name][-1] ^= 4
    equal(numbers(queue.batch(9, 1000)), [2])
    queue.acknowledge(1)
    equal((queue.batch(9, 1000), queue.depth, queue.dropped), ([], 0, 2))
    assert queue.append(record(9))
    equal(drained(queue), [9])


def test_files_that_are_none_are_survived():
    for junk in (b"\0", b"OGQ1", b"\xff" * 300, b"<html>" * 50, bytes(400)):
        for name in ("queue.a", "queue.b", "queue.pos"):
            storage = Storage()
            storage.files[name] = bytearray(junk)
            queue = Queue(storage)
            assert queue.append(record(1))
            equal(drained(Queue(storage)), [1])


def test_a_flipped_bit_in_the_position_only_repeats():
    for place in range(20):
        storage = Storage()
        queue = filled(storage, 4)
        queue.batch(2, 1000)
        queue.acknowledge(2)
        storage.files["queue.pos"][place] ^= 1
        equal(drained(Queue(storage)), [0, 1, 2, 3])


def test_a_position_beyond_a_log_that_lost_its_end_loses_no_later_record():
    storage = Storage()
    queue = filled(storage, 6)
    queue.batch(6, 1000)
    queue.acknowledge(5)
    name = "queue.a" if storage.size("queue.a") else "queue.b"
    storage.files[name] = storage.files[name][: HEADER + 2 * (FRAME + 40)]
    queue = Queue(storage)
    for number in range(10, 16):
        assert queue.append(record(number))
    equal(drained(Queue(storage)), list(range(10, 16)))


def test_a_record_behind_a_damaged_one_is_found_wherever_it_begins():
    for size in range(232, 264):
        storage = Storage()
        queue = Queue(storage)
        assert queue.append(record(1, size))
        assert queue.append(record(2))
        name = "queue.a" if storage.size("queue.a") else "queue.b"
        storage.files[name][HEADER + FRAME + 9] ^= 1
        equal(drained(Queue(storage)), [2])


def test_a_position_of_another_generation_means_nothing():
    storage = Storage()
    queue = filled(storage, 3)
    queue.batch(2, 1000)
    queue.acknowledge(2)
    name = "queue.a" if storage.size("queue.a") else "queue.b"
    storage.files[name][7] += 2  # the position could not be written when this log was begun
    equal(drained(Queue(storage)), [0, 1, 2])


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
