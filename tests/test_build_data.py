"""The data section of a recipe: mixtures, datasets, rows that are skipped, and answers from a server, on a tiny model."""

import json
from collections import Counter

import pytest
import torch
from rude_server import rude_server
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from headstart.build_data import build_conversations, build_samples, check_author
from headstart.build_heads import build_vocabulary
from headstart.data.agreement import a_few
from headstart.data.chat import Sample
from headstart.errors import UserError
from headstart.heads.verifier import Verifier
from headstart.training.recipe import Recipe

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def verifier():
    vocab = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    config = LlamaConfig(
        vocab_size=len(vocab), hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.5, max_position_embeddings=512, bos_token_id=0, eos_token_id=3,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHATML)
    return Verifier(model, fast, "tiny")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def recipe(train, **data):
    return Recipe.model_validate(
        {
            "verifier": {"model": "tiny"},
            "data": {"train": train, "holdout": 0.25, "max_length": 128, "answer_tokens": 8} | data,
            "head": {"kind": "medusa"},
            "training": {"steps": 1, "learning_rate": 1e-3},
        }
    )


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def pair(name, i):
    return {"prompt": f"{name} {i}?", "response": "fine"}


def names(conversations):
    return [row.messages[0]["content"] for row in (*conversations.train, *conversations.holdout)]


def test_weights_make_the_mixture_and_the_seed_chooses(tmp_path):
    one = write(tmp_path / "one.jsonl", *[pair("one", i) for i in range(40)])
    other = write(tmp_path / "other.csv", "frage;antwort", *[f"other {i}?;fine" for i in range(30)])
    train = [{"file": one, "weight": 1}, {"file": other, "weight": 3, "columns": {"prompt": "frage", "response": "antwort"}}]
    found = build_conversations(recipe(train))
    assert Counter(name.split()[0] for name in names(found)) == {"one": 10, "other": 30}
    assert len(set(names(found))) == 40  # so nothing that is trained on is held out
    assert len(found.holdout) == 10
    assert names(build_conversations(recipe(train))) == names(found)
    small = build_conversations(recipe(train, rows=8))
    assert Counter(name.split()[0] for name in names(small)) == {"one": 2, "other": 6}


def test_a_dataset_is_a_source_like_any_other(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", *[pair("set", i) for i in range(12)])
    chats = write(tmp_path / "chats.jsonl", *[pair("file", i) for i in range(12)])
    folder = str(tmp_path / "set")
    assert len(names(build_conversations(recipe([chats, {"dataset": folder}])))) == 24
    stream = {"dataset": folder, "streaming": True, "weight": 1}
    found = build_conversations(recipe([{"file": chats, "weight": 1}, stream], rows=8))
    assert sorted(name for name in names(found) if name.startswith("set")) == [f"set {i}?" for i in range(4)]
    alone = build_conversations(recipe([{"dataset": folder, "streaming": True}], rows=5))
    assert sorted(names(alone)) == [f"set {i}?" for i in range(5)]


def test_bad_rows_stop_or_are_counted(tmp_path):
    path = write(tmp_path / "a.jsonl", *[pair("a", i) for i in range(8)], "{broken", {"messages": []})
    with pytest.raises(UserError, match=r"a.jsonl:9: broken JSON"):
        build_conversations(recipe([path]))
    found = build_conversations(recipe([path], bad_rows="skip"))
    assert (len(names(found)), found.skips.counts) == (8, {"broken JSON": 1, "no messages": 1})


def test_answers_from_a_server_become_samples(tmp_path, verifier):
    rows = [{"messages": [{"role": "user", "content": f"q{i}"}]} for i in range(8)]
    path = write(tmp_path / "a.jsonl", *rows)
    with rude_server() as rude:
        rude.replies |= {f"q{i}": {"message": {"content": "half"}, "finish_reason": "length"} for i in range(4)}
        plan = recipe([path], answers={"server": rude.url})
        conversations = build_conversations(plan)
        found, source = build_samples(plan, verifier, conversations)
        asked = sum(rude.asked.values())
        again = build_conversations(plan)
        assert list(build_samples(plan, verifier, again)[0]) == list(found)
        assert sum(rude.asked.values()) == asked == len(conversations.train)  # not what is held out, and only once
        rude.tries.clear()
        rude.faults = {f"q{i}": [400] for i in range(8)}
        with pytest.raises(UserError, match=r"^not one of the 6 conversations has an answer: 6 of 6 rows have a question that"):
            build_samples(recipe([path], answers={"server": rude.url}, answer_tokens=9), verifier, build_conversations(plan))
    for row, sample in zip(conversations.train, found, strict=True):
        question = row.messages[0]["content"]
        learned = [id for id, on in zip(sample.ids, sample.mask, strict=True) if on]
        expected = "half" if int(question[1:]) < 4 else f"answer to {question}<|im_end|>"
        assert verifier.tokenizer.decode(learned) == expected
    cut = sum(int(row.messages[0]["content"][1:]) < 4 for row in conversations.train)
    assert 0 < cut < 6
    assert conversations.skips.counts == {"an answer cut short by answer_tokens": cut}
    assert check_author(plan, found, source).tokens > 0


def test_completed_answers_are_the_verifiers(tmp_path, verifier):
    open_end = [{"prompt": f"open {i}?"} for i in range(6)]
    path = write(tmp_path / "a.jsonl", *[pair("whole", i) for i in range(6)], *open_end)
    plan = recipe([path], answers="complete", features="memory")
    conversations = build_conversations(plan)
    found, source = build_samples(plan, verifier, conversations)
    assert [sample.id for sample in found] == [row.id for row in conversations.train]
    for i, (row, sample) in enumerate(zip(conversations.train, found, strict=True)):
        text = verifier.tokenizer.decode([id for id, on in zip(sample.ids, sample.mask, strict=True) if on])
        assert (text == "fine<|im_end|>") == (row.messages[0]["content"].startswith("whole"))
        batch, features = source.load([i])
        choice = verifier.model(batch.ids).logits[0].argmax(-1)
        learned = batch.mask[0, 1:]
        assert features.choice[0, :-1][learned].tolist() == choice[:-1][learned].tolist()


def test_case_55_training_on_another_authors_answers_is_measured(tmp_path, verifier):
    path = write(tmp_path / "a.jsonl", *[pair("a", i) for i in range(8)])
    kept = recipe([path])
    samples, source = build_samples(kept, verifier, build_conversations(kept))
    tokens = agreeing = 0
    for sample in samples:
        choice = verifier.model(torch.tensor([sample.ids])).logits[0].argmax(-1).tolist()
        learned = [at for at, on in enumerate(sample.mask) if on]
        tokens += len(learned)
        agreeing += sum(choice[at - 1] == sample.ids[at] for at in learned)
    found = check_author(kept, samples, source)
    assert (found.tokens, found.agreeing) == (tokens, agreeing)
    assert found.warning
    own = recipe([path], answers="regenerate")
    samples, source = build_samples(own, verifier, build_conversations(own))
    assert check_author(own, samples, source) is None
    drawn = recipe([path], answers={"temperature": 1.0, "seed": 5})
    samples, source = build_samples(drawn, verifier, build_conversations(drawn))
    assert 0 < check_author(drawn, samples, source).share < 1


def test_case_12_the_template_keeps_its_tokens_and_coverage_is_printed(verifier, capsys):
    """<|im_start|> and <|im_end|> stand in the template; neither is a special token by the tokenizer's own account."""
    a, b, c = (verifier.tokenizer.convert_tokens_to_ids(letter) for letter in "abc")
    samples = [Sample([9, a, a, a, b, b, c], [False] + [True] * 6)]
    ids = build_vocabulary(5, verifier, samples).tolist()
    assert set(verifier.tokenizer.all_special_ids) == {3}
    assert ids == sorted([2, 3, a, b, c])
    assert build_vocabulary(4, verifier, samples).tolist() == sorted([2, 3, a, b])
    told = capsys.readouterr().err.splitlines()
    rows = verifier.facts.vocab_size
    assert told == [
        f"draft vocabulary: 5 of {rows} tokens, 100.00% of the supervised ones",
        f"draft vocabulary: 4 of {rows} tokens, 83.33% of the supervised ones",
    ]
    with pytest.raises(UserError, match=r"^draft vocabulary of 1: must hold the 2 special tokens"):
        build_vocabulary(1, verifier, samples)


def test_a_few_samples_stand_for_all(verifier):
    class Long:
        ids = range(100)

    assert a_few([Long] * 50, 1000) == [[i] for i in range(0, 50, 5)]
    assert a_few([Long] * 3, 1000) == [[0], [1], [2]]
    assert a_few([Long] * 3, 10) == [[0]]
