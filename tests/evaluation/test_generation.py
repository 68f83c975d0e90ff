"""Library use: one prompt decoded with a head, whole or piece by piece, equal to transformers' own greedy text."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import headstart
from headstart import DynamicTree, Verifier, chain, load_head, save_head, speculative_generate, speculative_stream
from headstart.errors import UserError
from headstart.evaluation.ngrams import PromptLookup

Build = Callable[..., Any]
CHATML = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


@pytest.fixture
def talking(tiny: Build) -> Verifier:
    """A tiny llama with a tokenizer of bytes: most of its characters are halves that wait for others."""
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    plain = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", chat_template=CHATML)
    return Verifier(tiny("llama", vocab_size=258, eos_token_id=1, pad_token_id=1).model, tokenizer, "talking")


def greedy(verifier: Verifier, ids: list[int], budget: int) -> list[int]:
    """Token by token with transformers alone."""
    out = list(ids)
    while len(out) < len(ids) + budget:
        out.append(int(verifier.model(torch.tensor([out])).logits[0, -1].argmax()))
        if out[-1] in verifier.facts.stop_ids:
            break
    return out[len(ids) :]


def test_the_answer_with_prompt_lookup_is_the_verifiers_own(talking: Verifier) -> None:
    asked = talking.tokenizer("<user>ho ho ho<a>").input_ids
    lookup = PromptLookup(258, torch.device("cpu"), longest=1, shortest=1)
    answer = speculative_generate(talking, lookup, chain(3), asked, max_new_tokens=20)
    assert answer.tokens == greedy(talking, asked, 20)


@pytest.mark.parametrize("tree", [chain(3), DynamicTree(3, 3, 9)])
@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_the_answer_is_the_verifiers_own(
    kind: str, tree: Any, talking: Verifier, tiny_medusa: Build, tiny_eagle3: Build
) -> None:
    head = {"medusa": tiny_medusa, "eagle3": tiny_eagle3}[kind](talking)
    asked = talking.tokenizer("<user>hello<a>").input_ids
    expected = greedy(talking, asked, 20)
    answer = speculative_generate(talking, head, tree, "hello", max_new_tokens=20)
    assert answer.tokens == expected
    assert answer.text == talking.tokenizer.decode(expected, skip_special_tokens=True)
    assert 0 < answer.rounds < 20
    assert answer.tau == (len(expected) - 1) / answer.rounds  # the first token is the prompt's pass
    assert speculative_generate(talking, head, tree, asked, max_new_tokens=20) == answer
    pieces = list(speculative_stream(talking, head, tree, "hello", max_new_tokens=20))
    assert "".join(pieces) == answer.text
    assert all(pieces)


def test_pieces_come_while_decoding_goes_on(talking: Verifier, tiny_medusa: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    decode = Verifier.decode
    monkeypatch.setattr(Verifier, "decode", lambda self, *args: (passes.append(1), decode(self, *args))[1])
    stream = speculative_stream(talking, tiny_medusa(talking), chain(1), "hello", max_new_tokens=40)
    next(stream)
    early = len(passes)
    list(stream)
    assert early < len(passes) / 2


def test_an_answer_of_one_token_has_no_round(talking: Verifier, tiny_medusa: Build) -> None:
    answer = speculative_generate(talking, tiny_medusa(talking), chain(2), "hello", max_new_tokens=1)
    assert (len(answer.tokens), answer.rounds, answer.tau) == (1, 0, None)
    assert "".join(speculative_stream(talking, tiny_medusa(talking), chain(2), "hello", 1)) == answer.text


def test_a_head_from_a_folder(talking: Verifier, tiny_eagle3: Build, tmp_path: Path) -> None:
    head = tiny_eagle3(talking)
    save_head(head, tmp_path / "head")
    tree = chain(3)
    assert speculative_generate(talking, load_head(tmp_path / "head"), tree, "hi", 12) == speculative_generate(
        talking, head, tree, "hi", 12
    )


def test_without_a_tokenizer(tiny: Build, tiny_medusa: Build, ids_of: Build) -> None:
    verifier = tiny("llama")
    head = tiny_medusa(verifier)
    answer = speculative_generate(verifier, head, chain(2), ids_of(1, 5), max_new_tokens=6)
    assert (answer.tokens, answer.text) == (greedy(verifier, ids_of(1, 5), 6), None)
    with pytest.raises(UserError, match="no tokenizer: give the prompt as token ids"):
        speculative_generate(verifier, head, chain(2), "hello")
    with pytest.raises(UserError, match="no tokenizer to write text with"):
        next(speculative_stream(verifier, head, chain(2), [1, 2]))


def test_what_cannot_be_decoded(tiny: Build, tiny_medusa: Build, talking: Verifier) -> None:
    head = tiny_medusa(talking)
    with pytest.raises(UserError, match=r"^a chain tree of depth 4 is deeper than its drafter, which has 3$"):
        speculative_generate(talking, head, chain(4), "hello", 8)
    with pytest.raises(UserError, match=r"250 tokens and max_new_tokens=7: .* at most 256"):
        speculative_generate(talking, head, chain(2), [5] * 250, max_new_tokens=7)
    with pytest.raises(UserError, match="a prompt of 0 tokens"):
        speculative_generate(talking, head, chain(2), [])
    with pytest.raises(UserError, match="the head's vocabulary is 96, the verifier's 258"):
        speculative_generate(talking, tiny_medusa(tiny("llama")), chain(2), "hello")


def test_the_example_of_the_readme(
    talking: Verifier, tiny_eagle3: Build, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = Path(headstart.__file__).with_name("README.md").read_text(encoding="utf-8")
    example = readme.split("```python\n")[1].split("```")[0]
    head = tiny_eagle3(talking)
    monkeypatch.setattr(Verifier, "load", lambda spec: talking)
    monkeypatch.setattr("headstart.heads.hub.load_head", lambda folder: head)
    names: dict[str, Any] = {}
    exec(example, names)
    out = capsys.readouterr().out
    assert len(example.strip().splitlines()) <= 15
    assert out.startswith(f"{names['answer'].text}\ntau ")
    assert out.endswith(names["answer"].text)  # the stream's


def test_importing_the_package_imports_no_torch() -> None:
    code = "import headstart, sys; assert 'torch' not in sys.modules; headstart.chain; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_every_name_is_there() -> None:
    for name in headstart.__all__:
        assert getattr(headstart, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        headstart.nothing  # noqa: B018
