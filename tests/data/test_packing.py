"""Batches: every sample once an epoch, no more tokens than allowed, the same order every time, padding told by lengths."""

import math
import random

import pytest
import torch

from headstart.data.chat import Sample
from headstart.data.packing import batch_order, batch_plan, collate, packed_order, packed_rows, split_by_tokens

CPU = torch.device("cpu")


def some_lengths(count, seed=0, longest=60):
    rng = random.Random(seed)
    return [rng.randrange(2, longest) for _ in range(count)]


@pytest.mark.parametrize("batch_tokens", [1, 64, 200, 5000])
def test_an_epoch_has_every_sample_once_within_the_limit(batch_tokens):
    lengths = some_lengths(150)
    batches = batch_order(lengths, batch_tokens, seed=3, epoch=0)
    assert sorted(i for batch in batches for i in batch) == list(range(150))
    for batch in batches:
        assert batch
        assert len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= batch_tokens


def test_a_sample_longer_than_the_limit_stands_alone():
    assert split_by_tokens([0, 1, 2, 3], [5, 90, 5, 5], 20) == [[0], [1], [2, 3]]


def test_batches_are_as_large_as_the_limit_allows():
    lengths = [10] * 20
    assert [len(batch) for batch in batch_order(lengths, 50, 0, 0)] == [5] * 4


def test_like_lengths_go_together():
    """Sorted groups keep padding small; a shuffle alone would waste a third."""
    lengths = some_lengths(400, longest=100)
    batches = batch_order(lengths, 400, seed=0, epoch=0)
    padded = sum(max(lengths[i] for i in batch) * len(batch) for batch in batches)
    assert padded < 1.1 * sum(lengths)


def test_lengths_need_not_be_grouped():
    """Every sample once, in an order that knows nothing of lengths; a plan takes it on."""
    lengths = some_lengths(400, longest=100)
    batches = batch_order(lengths, 400, 1, 0, grouped=False)
    assert sorted(i for batch in batches for i in batch) == list(range(400))
    padding = [sum(max(lengths[i] for i in b) * len(b) for b in part) for part in (batches, batch_order(lengths, 400, 1, 0))]
    assert padding[0] > 1.2 * padding[1]
    assert batch_order([50] * 400, 400, 1, 0, grouped=False) == batch_order([7] * 400, 56, 1, 0, grouped=False)
    assert batch_plan(lengths, 400, 1, len(batches) + 1, None, grouped=False)[: len(batches)] == batches


def test_order_depends_on_seed_and_epoch_alone():
    lengths = some_lengths(120)
    assert batch_order(lengths, 200, 7, 2) == batch_order(lengths, 200, 7, 2)
    orders = [batch_order(lengths, 200, seed, epoch) for seed, epoch in [(7, 2), (7, 3), (8, 2)]]
    assert all(orders.count(order) == 1 for order in orders)
    assert orders[0] != sorted(orders[0], key=lambda batch: lengths[batch[0]])  # not from short to long


def test_a_plan_by_steps_goes_through_as_many_epochs_as_it_takes():
    lengths = some_lengths(40)
    epochs = [batch_order(lengths, 100, 5, epoch) for epoch in range(3)]
    steps = len(epochs[0]) + len(epochs[1]) + 3
    assert batch_plan(lengths, 100, 5, steps, None) == epochs[0] + epochs[1] + epochs[2][:3]
    assert batch_plan(lengths, 100, 5, 1, None) == epochs[0][:1]


@pytest.mark.parametrize(("epochs", "full", "share"), [(1.0, 1, 0.0), (2.0, 2, 0.0), (0.5, 0, 0.5), (1.25, 1, 0.25)])
def test_a_plan_by_epochs_may_end_within_one(epochs, full, share):
    lengths = [10] * 80
    batches = [batch_order(lengths, 100, 5, epoch) for epoch in range(3)]
    assert [len(epoch) for epoch in batches] == [8, 8, 8]
    expected = [batch for epoch in batches[:full] for batch in epoch] + batches[full][: math.ceil(8 * share)]
    assert batch_plan(lengths, 100, 5, None, epochs) == expected


def test_a_tenth_of_an_epoch_is_a_tenth_wherever_it_stands():
    """1.1 - 1 is a little more than 0.1 in floating point."""
    lengths = [10] * 100
    assert [len(batch_plan(lengths, 100, 0, None, epochs)) for epochs in (0.1, 1.1, 2.1)] == [1, 11, 21]


def test_a_plan_by_epochs_has_at_least_one_step():
    assert len(batch_plan([10] * 80, 100, 0, None, 0.001)) == 1


def test_a_longer_plan_begins_with_the_shorter_one():
    lengths = some_lengths(50)
    assert batch_plan(lengths, 100, 1, 40, None)[:15] == batch_plan(lengths, 100, 1, 15, None)


def test_case_16_padding_is_told_by_lengths_never_by_an_id():
    """Pad id, stop id and id 0 are all one here; the stop tokens stay supervised."""
    stop = 0
    batch = collate([Sample([5, 6, stop], [False, True, True]), Sample([5, stop], [False, True])], CPU)
    assert batch.ids.tolist() == [[5, 6, stop], [5, stop, 0]]
    assert batch.mask.tolist() == [[False, True, True], [False, True, False]]
    assert batch.lengths.tolist() == [3, 2]
    assert (batch.ids.dtype, batch.mask.dtype) == (torch.long, torch.bool)


@pytest.mark.parametrize("batch_tokens", [1, 64, 200, 5000])
def test_packed_batches_have_every_sample_once_within_the_limit(batch_tokens):
    lengths = some_lengths(150)
    batches = packed_order(lengths, batch_tokens, seed=3, epoch=0)
    assert sorted(i for batch in batches for i in batch) == list(range(150))
    longest = max(lengths)
    for batch in batches:
        rows = packed_rows([lengths[i] for i in batch], longest)
        assert sorted(i for row in rows for i in row) == list(range(len(batch)))
        assert all(sum(lengths[batch[i]] for i in row) <= longest for row in rows)
        assert len(rows) * longest <= max(batch_tokens, longest)


def test_packed_rows_are_nearly_full_whatever_the_lengths():
    """Batches of any lengths, little padding; padded rows of the same batches would be half empty."""
    lengths = some_lengths(600, longest=100)
    batches = packed_order(lengths, 400, seed=0, epoch=0)
    longest = max(lengths)
    rows = sum(len(packed_rows([lengths[i] for i in batch], longest)) for batch in batches)
    assert sum(lengths) / (rows * longest) > 0.95
    assert sum(len(batch) * longest for batch in batches) > 1.7 * sum(lengths)


def test_packed_order_depends_on_seed_and_epoch_alone_and_a_plan_goes_on_from_it():
    lengths = some_lengths(120)
    assert packed_order(lengths, 200, 7, 2) == packed_order(lengths, 200, 7, 2)
    orders = [packed_order(lengths, 200, seed, epoch) for seed, epoch in [(7, 2), (7, 3), (8, 2)]]
    assert all(orders.count(order) == 1 for order in orders)
    epochs = [packed_order(lengths, 200, 5, epoch) for epoch in range(2)]
    steps = len(epochs[0]) + 4
    assert batch_plan(lengths, 200, 5, steps, None, packing=True) == epochs[0] + epochs[1][:4]


def test_rows_are_filled_in_the_order_given_or_in_fewer_rows():
    assert packed_rows([5, 3, 2, 9, 4, 4, 1], 9) == [[0, 1], [2], [3], [4, 5, 6]]
    assert packed_rows([12, 2, 11], 10) == [[0], [1], [2]]  # too long for a row: alone
    assert packed_rows([5, 6, 4, 5], 10) == [[1, 2], [0, 3]]  # as they come: three


def test_the_share_of_one_process_of_a_batch_is_nearly_as_full():
    """Every second sample of a batch of sixteen rows fills eight or nine, not twelve."""
    lengths = some_lengths(2000, longest=60)
    longest = max(lengths)
    for batch in packed_order(lengths, 16 * longest, seed=0, epoch=0)[:-1]:
        for part in (batch[::2], batch[1::2]):
            assert len(packed_rows([lengths[i] for i in part], longest)) <= sum(lengths[i] for i in part) / longest + 1.5


def test_a_packed_batch_by_hand():
    samples = [Sample([5, 6, 7], [False, True, True]), Sample([8, 9], [True, True]), Sample([4, 3], [False, True])]
    batch = collate(samples, CPU, [[0, 2], [1]])
    assert batch.ids.tolist() == [[5, 6, 7, 4, 3], [8, 9, 0, 0, 0]]
    assert batch.mask.tolist() == [[False, True, True, False, True], [True, True, False, False, False]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 0, 0]]
    assert batch.lengths.tolist() == [5, 2]
    assert batch.document_lengths().tolist() == [[3, 3, 3, 2, 2], [2, 2, 1, 1, 1]]


def test_a_shift_ends_with_its_document():
    samples = [Sample([5, 6, 7], [True] * 3), Sample([8, 9], [True] * 2), Sample([4], [True])]
    packed, alone = collate(samples, CPU, [[0, 1, 2]]), collate(samples, CPU)
    assert packed.ahead(packed.ids, 1, -1).tolist() == [[6, 7, -1, 9, -1, -1]]
    assert packed.ahead(packed.ids, 2, -1).tolist() == [[7, -1, -1, -1, -1, -1]]
    assert packed.ahead(packed.ids, 9, -1).tolist() == [[-1] * 6]
    states = torch.arange(12.0).reshape(1, 6, 2)
    assert packed.ahead(states, 1, 0.0).tolist() == [[[2, 3], [4, 5], [0, 0], [8, 9], [0, 0], [0, 0]]]
    assert alone.ahead(alone.ids, 1, -1).tolist() == [[6, 7, -1], [9, 0, -1], [0, 0, -1]]
