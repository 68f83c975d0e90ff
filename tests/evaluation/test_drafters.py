"""Drafters that are no trained heads: what they propose against a reading of the definition, and that the text stays."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headstart.errors import UserError
from headstart.evaluation.decode import Decoded, speculate
from headstart.evaluation.draft_model import ModelDrafter
from headstart.evaluation.hierarchical import Hierarchical
from headstart.evaluation.lookahead import Lookahead
from headstart.evaluation.ngrams import PromptLookup
from headstart.evaluation.sampling import Sampling
from headstart.evaluation.tree import AnyTree, DynamicTree, StaticTree, chain
from headstart.heads.drafter import Drafter
from headstart.heads.generate import generate
from headstart.heads.truncated import first_layers
from headstart.heads.verifier import Features, Verifier

CPU = torch.device("cpu")
PROMPTS = [[3, 4], [5, 6, 7, 8, 9, 5, 6, 7], [10, 11, 12, 13, 14, 15, 16, 17, 18]]
TREES: dict[str, AnyTree] = {
    "chain": chain(3),
    "static": StaticTree([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]),
    "dynamic": DynamicTree(depth=3, top_k=3, nodes=9),
}
NOTHING = Features(torch.zeros(1, 1, 0), torch.zeros(1, 1, 0))


def unstopped(verifier: Verifier) -> Verifier:
    verifier.facts = dataclasses.replace(verifier.facts, stop_ids=())
    return verifier


@pytest.fixture
def llama(tiny: Callable[..., Verifier]) -> Verifier:
    return unstopped(tiny("llama"))


@pytest.fixture
def drafter_of(tiny: Callable[..., Verifier], tiny_eagle3: Any, tiny_medusa: Any) -> Callable[[str, Verifier], Drafter]:
    makers: dict[str, Callable[[Verifier], Drafter]] = {
        "prompt_lookup": lambda v: PromptLookup(96, CPU, longest=2, shortest=1),
        "lookahead": lambda v: Lookahead(96, CPU),
        "truncated": lambda v: ModelDrafter(first_layers(v, 3), v),
        "model": lambda v: ModelDrafter(tiny("gpt2", seed=5), v),
        "hierarchical": lambda v: Hierarchical(PromptLookup(96, CPU, longest=2, shortest=1), tiny_eagle3(v)),
        "hierarchical_medusa": lambda v: Hierarchical(PromptLookup(96, CPU, longest=2, shortest=1), tiny_medusa(v)),
    }
    return lambda name, verifier: makers[name](verifier)


KINDS = ["prompt_lookup", "lookahead", "truncated", "model", "hierarchical", "hierarchical_medusa"]


def by_full_forward(verifier: Verifier, prompt: list[int], tokens: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(verifier.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def tokens_of(decoded: list[Decoded]) -> list[list[int]]:
    return [answer.tokens for answer in decoded]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("family", "shape"), [*(("llama", shape) for shape in TREES), ("gemma3", "dynamic")])
def test_greedy_text_is_the_verifiers_and_a_batch_decodes_as_its_rows_alone(
    family: str, shape: str, kind: str, tiny: Callable[..., Verifier], drafter_of: Any
) -> None:
    """Tokens, sources, rounds and what was drafted in each of them."""
    verifier, tree = unstopped(tiny(family)), TREES[shape]
    drafter = drafter_of(kind, verifier)
    together, _ = speculate(verifier, drafter, tree, PROMPTS, 18)
    assert tokens_of(together) == [by_full_forward(verifier, prompt, 18) for prompt in PROMPTS]
    assert together == [speculate(verifier, drafter, tree, [prompt], 18)[0][0] for prompt in PROMPTS]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_stop_leave_the_others_alone(kind: str, llama: Verifier, drafter_of: Any) -> None:
    """One before the drafter has seen a token, the others at different rounds."""
    texts = generate(llama, PROMPTS, 20)
    stops = {texts[1][0], texts[0][4], texts[2][9]}
    llama.facts = dataclasses.replace(llama.facts, stop_ids=tuple(stops))
    expected = generate(llama, PROMPTS, 20)
    assert len({len(text) for text in expected}) > 1
    assert len(expected[1]) == 1
    for tree in TREES.values():
        assert tokens_of(speculate(llama, drafter_of(kind, llama), tree, PROMPTS, 20)[0]) == expected


@pytest.mark.parametrize("budget", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_tokens_asked_for(kind: str, budget: int, llama: Verifier, drafter_of: Any) -> None:
    for tree in TREES.values():
        decoded, _ = speculate(llama, drafter_of(kind, llama), tree, PROMPTS, budget)
        assert tokens_of(decoded) == generate(llama, PROMPTS, budget)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_beyond_the_context_limit_are_harmless(
    kind: str, family: str, tiny: Callable[..., Verifier], drafter_of: Any
) -> None:
    """The answer ends with the last position there is; the trees of the last rounds reach behind it."""
    verifier = unstopped(tiny(family, max_position_embeddings=24))
    drafter = drafter_of(kind, verifier)
    for tree in TREES.values():
        decoded, _ = speculate(verifier, drafter, tree, [PROMPTS[2]], 24 - len(PROMPTS[2]))
        assert tokens_of(decoded) == [by_full_forward(verifier, PROMPTS[2], 15)]


@pytest.mark.parametrize("kind", ["medusa", "eagle1", "eagle3", "mtp parallel", "mtp sequential", "mtp recursive"])
def test_every_head_in_a_ragged_batch_up_to_the_context_limit(
    kind: str, tiny: Callable[..., Verifier], request: pytest.FixtureRequest
) -> None:
    """The longest prompt's answer ends with the last position there is; each row is what it is alone."""
    verifier = unstopped(tiny("llama", max_position_embeddings=24))
    name, *form = kind.split()
    head = request.getfixturevalue(f"tiny_{name}")(verifier, *form)
    expected = [by_full_forward(verifier, prompt, 15) for prompt in PROMPTS]
    for tree in (TREES["static"], TREES["dynamic"]):
        together, _ = speculate(verifier, head, tree, PROMPTS, 15)
        assert tokens_of(together) == expected
        assert together == [speculate(verifier, head, tree, [prompt], 15)[0][0] for prompt in PROMPTS]


def followed(text: list[int], longest: int, shortest: int, matches: int, length: int) -> list[list[int]]:
    """Where the last tokens stood before, longest first, latest first: the tokens behind, by trying every place."""
    places: list[int] = []
    for size in range(longest, shortest - 1, -1):
        found = [at for at in range(size, len(text)) if text[at - size : at] == text[-size:]]
        places += [at for at in reversed(found[-matches:]) if at not in places]
    return [text[at : at + length] for at in places[:matches]]


@pytest.mark.parametrize("seed", range(4))
def test_prompt_lookup_follows_the_last_tokens_to_where_they_stood(seed: int) -> None:
    rng = random.Random(seed)
    drafter = PromptLookup(5, CPU, longest=3, shortest=1, matches=3, length=4)
    session = drafter.begin(None, 1, 99)  # type: ignore[arg-type]
    text = [rng.randrange(5) for _ in range(6)]
    session.start([text])
    new = text[1:]
    for _ in range(12):
        session.observe(NOTHING, torch.tensor([[*new, 0]]), [len(new)])
        assert session.guesses(0) == followed(text, 3, 1, 3, 4)
        new = [rng.randrange(5) for _ in range(rng.randrange(1, 4))]
        text += new


def test_the_tree_of_a_prompt_lookup() -> None:
    """... 7 8 1 | 7 8 2 4 | 7 8: behind 7 8 stood 2 4 7 8 last and 1 7 8 2 before; as probable as 2 to 1, then certain."""
    drafter = PromptLookup(9, CPU, longest=2, shortest=2, matches=4, length=3)
    text = [7, 8, 1, 7, 8, 2, 4, 7, 8]
    session = drafter.begin(None, 1, 99)  # type: ignore[arg-type]
    session.start([text])
    log_q = session.observe(NOTHING, torch.tensor([text[1:]]), [8])
    torch.testing.assert_close(log_q.exp()[0], torch.tensor([0, 1 / 3, 2 / 3, 0, 0, 0, 0, 0, 0]))
    assert session.reach == (3, 6)
    tree = StaticTree([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]])
    grown = tree.grow(session, torch.tensor([8]), log_q, drafter.target_ids)
    there = [i for i, parent in enumerate(grown.parents[0].tolist()) if parent >= 0]
    assert [tree.paths[i - 1] for i in there] == [(0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0)]
    assert [grown.ids[0, i].item() for i in there] == [2, 1, 4, 7, 7, 8]
    assert grown.drafted.tolist() == [6]

    log_q = session.observe(NOTHING, torch.tensor([[3]]), [1])  # 8 3 never stood anywhere
    assert session.reach == (0, 0)
    assert torch.isinf(log_q).all()
    assert DynamicTree(3, 2, 8).cut(*session.reach).nodes == 1


@pytest.mark.parametrize("seed", range(3))
def test_lookahead_is_jacobi_iteration_by_full_passes(seed: int, llama: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window of every round, from the definition: column i of level l stands 1 + i + l behind the root, after the oldest
    level's tokens up to its column and the older levels of its own column. Each column with what the verifier would write
    after it is an n-gram."""
    window, levels = 3, 2
    drafter = Lookahead(96, CPU, window=window, ngram=levels + 1)
    rng = random.Random(seed)
    prompt = [rng.randrange(1, 95) for _ in range(5)]
    learned: list[list[int]] = []
    made: list[Any] = []
    begin = Lookahead.begin
    monkeypatch.setattr(Lookahead, "begin", lambda *given: made.append(begin(*given)) or made[-1])
    (answer,), _ = speculate(llama, drafter, chain(2), [prompt], 14)
    (session,) = made
    text = prompt + answer.tokens
    grid = [[prompt[(level * window + i) % 5] for i in range(window)] for level in range(levels)]
    grams: list[tuple[int, ...]] = []
    for r in answer.rounds:
        learned = []
        for i in range(window):
            line = [*grid[0][: i + 1], *(grid[level][i] for level in range(1, levels))]
            with torch.no_grad():
                ids = torch.tensor([text[: r.context + 1] + line])
                learned.append(int(llama.model(input_ids=ids, use_cache=False).logits[0, -1].argmax()))
        grams += [(*(row[i] for row in grid), learned[i]) for i in range(window)]
        grid = [*grid[1:], learned]
    assert session.window[0].tolist() == grid
    known = {(first, *rest) for first, its in session.pools[0].items() for rest in its}
    assert known == set(grams)


def test_lookahead_drafts_the_latest_n_grams_of_the_root() -> None:
    session = Lookahead(50, CPU, window=2, ngram=3, guesses=2).begin(None, 1, 9)  # type: ignore[arg-type]
    session.start([[1]])
    for window, choice in ([[5, 5], [6, 7]], [8, 9]), ([[5, 4], [6, 7]], [8, 9]), ([[5, 5], [1, 2]], [3, 4]):
        session.window = torch.tensor([window])
        session.learn(torch.tensor([choice]))
    session.take(0, [4])
    assert session.guesses(0) == [[7, 9]]
    session.take(0, [9, 5])
    assert session.guesses(0) == [[2, 4], [1, 3]]


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_a_draft_model_equal_to_the_verifier_is_always_right(tree: AnyTree, llama: Verifier) -> None:
    """tau = depth + 1; and its first draft is the verifier's own distribution."""
    depth = tree.depth if not isinstance(tree, DynamicTree) else 1
    tree = DynamicTree(1, 2, 3) if isinstance(tree, DynamicTree) else tree
    budget = 1 + 4 * (depth + 1)
    decoded, _ = speculate(llama, ModelDrafter(llama, llama), tree, PROMPTS, budget)
    assert [[r.emitted for r in answer.rounds] for answer in decoded] == [[depth + 1] * 4] * 3


@pytest.mark.parametrize("kind", ["model", "truncated"])
def test_a_draft_model_drafts_what_full_passes_of_it_say(kind: str, llama: Verifier, drafter_of: Any) -> None:
    """Ragged rows, two rounds, a tree of two levels: log q after every node, and the first drafts that alpha is made of."""
    drafter = drafter_of(kind, llama)
    model = drafter.model.model

    def log_q(text: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].log_softmax(-1)

    texts = [[3, 4, 5, 6], [7, 8]]
    session = drafter.begin(llama, 2, 40)
    session.start(texts)
    following, counts = torch.tensor([[4, 5, 6], [8, 0, 0]]), [3, 1]
    for extra in ([[9], [10, 11]], [[12, 13], [14]]):
        found = session.observe(NOTHING, following, counts)
        for row, text in enumerate(texts):
            torch.testing.assert_close(found[row], log_q(text), atol=1e-4, rtol=1e-4)
        paths = [[(20,), (21,)], [(30,), (31,)]]
        level = session.expand(torch.tensor([[20, 21], [30, 31]]), torch.full((2, 2), -1))
        deeper = session.expand(torch.tensor([[22, 23], [32, 33]]), torch.tensor([[1, 0], [0, 0]]))
        ends = [[(21, 22), (20, 23)], [(30, 32), (30, 33)]]
        for row, text in enumerate(texts):
            for i in range(2):
                torch.testing.assert_close(level[row, i], log_q([*text, *paths[row][i]]), atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(deeper[row, i], log_q([*text, *ends[row][i]]), atol=1e-4, rtol=1e-4)
        texts = [text + new for text, new in zip(texts, extra, strict=True)]
        counts = [len(new) for new in extra]
        following = torch.tensor([new + [0] * (2 - len(new)) for new in extra])


def test_the_first_layers_are_the_verifiers_and_share_its_weights(tiny: Callable[..., Verifier]) -> None:
    for family in ("llama", "gpt2", "gemma3"):
        verifier = tiny(family)
        short = first_layers(verifier, 2)
        ids = torch.tensor([[5, 6, 7, 8]])
        with torch.no_grad():
            entering = verifier.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[2]
        norm = next(module for name, module in verifier.decoder.named_children() if name in ("norm", "ln_f"))
        with torch.no_grad():
            torch.testing.assert_close(short.features(ids).last, norm(entering), atol=1e-5, rtol=1e-5)
        assert {p.data_ptr() for p in short.model.parameters()} <= {p.data_ptr() for p in verifier.model.parameters()}
        assert verifier.config.num_hidden_layers == len(verifier.layers) == 4
        for layers in (0, 4):
            with pytest.raises(
                UserError, match=rf"^truncated: {layers} layers; verifier {family} has 4, so from 1 to 3 can draft$"
            ):
                first_layers(verifier, layers)


def test_a_model_of_another_vocabulary_is_refused(tiny: Callable[..., Verifier], llama: Verifier) -> None:
    with pytest.raises(
        UserError, match=r"^draft model qwen2: its vocabulary has 80 tokens, the verifier's 96; it must be the same$"
    ):
        ModelDrafter(tiny("qwen2", vocab_size=80, eos_token_id=79), llama)

    class Words:
        def __init__(self, *words: str) -> None:
            self.words = words

        def get_vocab(self) -> dict[str, int]:
            return {word: i for i, word in enumerate(self.words)}

    other = tiny("llama", vocab_size=80, eos_token_id=79)
    llama.tokenizer, other.tokenizer = Words("a", "b", "c"), Words("a", "b", "c")
    drafter = ModelDrafter(other, llama)  # one tokenizer, tables padded differently
    assert drafter.target_ids.tolist() == list(range(80))
    assert tokens_of(speculate(llama, drafter, chain(3), PROMPTS, 20)[0]) == generate(llama, PROMPTS, 20)
    other.tokenizer = Words("a", "c", "b")
    with pytest.raises(
        UserError, match=r"its tokenizer is not the verifier's: 'b' is 2 there and 1 here; it must be the same$"
    ):
        ModelDrafter(other, llama)


def test_hierarchical_drafts_by_lookup_where_there_is_one(llama: Verifier, tiny_eagle3: Any) -> None:
    """Row by row: the lookup's certainty over the whole vocabulary, or the head's log q at its own tokens."""
    head = tiny_eagle3(llama)
    drafter = Hierarchical(PromptLookup(96, CPU, longest=2, shortest=2), head)
    texts = [[7, 8, 2, 4, 7, 8], [1, 2, 3, 4, 5, 6]]
    ids = torch.tensor(texts)
    features = llama.features(ids[:, :-1], head.needs)
    both, alone = drafter.begin(llama, 2, 20), head.begin(llama, 2, 20)
    both.start(texts)
    found, own = both.observe(features, ids[:, 1:], [5, 5]), alone.observe(features, ids[:, 1:], [5, 5])
    assert both.reach is None
    assert found[0].exp().tolist() == [float(i == 2) for i in range(96)]
    torch.testing.assert_close(found[1, head.target_ids], own[1], atol=0, rtol=0)
    assert int(torch.isinf(found[1]).sum()) == 96 - len(head.target_ids)
    token = int(head.target_ids[own[1].argmax()])
    deeper = both.expand(torch.tensor([[2], [token]]), torch.tensor([[-1], [-1]]))
    assert deeper[0, 0].argmax() == 4
    expected = alone.expand(torch.tensor([[2], [token]]), torch.tensor([[-1], [-1]]))
    torch.testing.assert_close(deeper[1, 0, head.target_ids], expected[1, 0], atol=0, rtol=0)


@pytest.mark.parametrize("kind", ["prompt_lookup", "lookahead", "hierarchical", "truncated"])
def test_at_top_k_1_sampled_text_is_greedy_text(kind: str, llama: Verifier, drafter_of: Any) -> None:
    """Whatever is drafted, there is one text; drafts without a distribution are candidates under every rule."""
    expected = generate(llama, PROMPTS, 15)
    drafter = drafter_of(kind, llama)
    for rule in ("candidates", "without_replacement"):
        for tree in (TREES["chain"], TREES["static"]):
            decoded, _ = speculate(llama, drafter, tree, PROMPTS, 15, sampling=Sampling(1.0, rule, top_k=1))  # type: ignore[arg-type]
            assert tokens_of(decoded) == expected
