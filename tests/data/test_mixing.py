"""Mixtures: exact counts by hand, no row twice, the same rows for the same seed."""

from collections import Counter

import pytest

from headstart.data.mixing import mix, shares
from headstart.errors import UserError


@pytest.mark.parametrize(
    ("available", "weights", "limit", "expected"),
    [
        ([100, 100], [1, 1], None, [100, 100]),
        ([10, 100], [1, 1], None, [10, 10]),  # the scarcest source decides
        ([10, 100], [1, 3], None, [10, 30]),
        ([10, 100], [0.25, 0.75], 20, [5, 15]),
        ([100, 100, 100], [1, 1, 1], 10, [4, 3, 3]),  # the sum is exact
        ([7], [5], None, [7]),
        ([None, 100], [9, 1], 50, [45, 5]),
        ([None, 4], [9, 1], 50, [36, 4]),
        ([0, 5], [1, 1], None, [0, 0]),
        ([3, 9], [0.1, 0.3], None, [3, 9]),  # 0.1 / 0.4 is not a quarter in binary
    ],
)
def test_shares(available, weights, limit, expected):
    assert shares(available, weights, limit) == expected


def rows(name, count):
    return ((name, i) for i in range(count))


def test_the_seed_chooses_the_rows_and_none_comes_twice():
    def mixed(seed):
        return mix([rows("a", 50), rows("b", 20)], [3, 1], 40, [False, False], seed)

    found = mixed(0)
    assert Counter(name for name, _ in found) == {"a": 30, "b": 10}
    assert len(set(found)) == 40
    assert found == sorted(found)  # the order of the files
    assert mixed(0) == found
    assert mixed(1) != found
    assert [row for row in found if row[0] == "b"] != [("b", i) for i in range(10)]


def test_an_endless_source_gives_its_first_rows_and_no_more_are_read():
    taken = []

    def endless():
        number = 0
        while True:
            taken.append(number)
            yield ("s", number)
            number += 1

    found = mix([endless(), rows("a", 10)], [1, 1], 8, [True, False], 0)
    assert [row for row in found if row[0] == "s"] == [("s", i) for i in range(4)]
    assert len(found) == 8
    assert taken == [0, 1, 2, 3]


def test_a_stream_that_ends_early_is_refused():
    with pytest.raises(UserError, match=r"^data.train.1: 3 rows, its weight asks for 5; lower data.rows or the weight$"):
        mix([rows("a", 10), rows("s", 3)], [1, 1], 10, [False, True], 0)
