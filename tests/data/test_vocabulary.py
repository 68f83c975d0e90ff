"""The draft vocabulary against a count of one's own."""

import random
from collections import Counter

import pytest

from headstart.data.vocabulary import DraftVocabulary, choose_vocabulary
from headstart.errors import UserError


def sample(ids, learned=None):
    return ids, [True] * len(ids) if learned is None else learned


def test_the_most_frequent_supervised_tokens_are_kept():
    rows = [sample([7, 7, 7, 9, 9, 4]), sample([1, 1, 1, 1, 1, 9], [False] * 5 + [True])]
    assert choose_vocabulary(rows, 2, 50, []) == DraftVocabulary([7, 9], 6 / 7)  # 1 is of a prompt


def test_ties_go_to_the_lower_id():
    rows = [sample([30, 20, 10, 40, 20, 30, 10, 40])]
    assert choose_vocabulary(rows, 3, 50, []).ids == [10, 20, 30]


def test_case_12_pinned_ids_are_kept_whatever_their_count():
    """A corpus that was cut before every stop token, and 16 places."""
    rng = random.Random(0)
    rows = [sample([rng.randrange(20, 60) for _ in range(30)]) for _ in range(5)]
    found = choose_vocabulary(rows, 16, 100, [2, 97, 99, 2])
    counts = Counter(token for ids, _ in rows for token in ids)
    frequent = sorted(counts, key=lambda token: (-counts[token], token))[:13]
    assert found.ids == sorted([2, 97, 99, *frequent])
    assert found.coverage == sum(counts[token] for token in frequent) / 150


def test_a_pinned_token_that_also_occurs_takes_one_place():
    found = choose_vocabulary([sample([5, 5, 5, 6, 6, 7])], 3, 10, [5])
    assert found == DraftVocabulary([5, 6, 7], 1.0)


def test_the_size_is_exact_even_where_few_tokens_occur():
    """The lowest unseen ids fill up."""
    assert choose_vocabulary([sample([8, 8, 3])], 6, 20, [19]) == DraftVocabulary([0, 1, 2, 3, 8, 19], 1.0)


def test_the_whole_vocabulary():
    assert choose_vocabulary([sample([3])], 6, 6, [5]) == DraftVocabulary([0, 1, 2, 3, 4, 5], 1.0)


def test_nothing_supervised_covers_nothing():
    assert choose_vocabulary([sample([3, 4], [False, False])], 2, 9, [8]) == DraftVocabulary([0, 8], 0.0)


def test_case_12_a_size_that_cannot_hold_the_pinned_ids_is_refused():
    with pytest.raises(
        UserError, match=r"^draft vocabulary of 2: must hold the 3 special tokens and fit in the verifier's 50$"
    ):
        choose_vocabulary([sample([3])], 2, 50, [1, 2, 3])


def test_a_size_beyond_the_verifiers_is_refused():
    with pytest.raises(UserError, match=r"^draft vocabulary of 51: .* fit in the verifier's 50$"):
        choose_vocabulary([sample([3])], 51, 50, [])


def test_special_tokens_that_the_verifier_has_no_row_for_are_left_out():
    """A tokenizer may name more ids than the verifier's lm_head has rows: it can never say those."""
    assert choose_vocabulary([sample([3, 3, 4])], 3, 10, [9, 10, 11]).ids == [3, 4, 9]
