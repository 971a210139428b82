"""The queue's order against a sorted list."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.request import Request
from scheduler.waiting import QueueOrder, WaitingQueue
from tests.scheduler.drive import request

entries = st.lists(st.tuples(st.integers(-3, 3), st.booleans(), st.booleans()), max_size=30)  # priority, needs a scratch, in the background


@given(entries, st.sampled_from(QueueOrder), st.data())
def test_heads_are_those_of_sorted_lists(entries: list[tuple[int, bool, bool]], order: QueueOrder, data: st.DataObject) -> None:
    queue, model = WaitingQueue(order), list[Request]()
    for arrival, (priority, needs_scratch, is_background) in enumerate(entries):
        model.append(Request(request("a", priority=priority, is_background=is_background), 0, needs_scratch, arrival))
        queue.push(model[-1])
    while model:
        model.sort(key=lambda r: (r.add.is_background, r.add.priority if order is QueueOrder.PRIORITY else 0, r.arrival_order))
        heads = [next((r for r in model if r.needs_scratch is line), None) for line in (False, True)]
        assert queue.heads() == sorted((head for head in heads if head is not None), key=model.index)
        assert len(queue) == len(model)
        queue.remove(model.pop(data.draw(st.integers(0, len(model) - 1))))
    assert (len(queue), queue.heads()) == (0, [])
