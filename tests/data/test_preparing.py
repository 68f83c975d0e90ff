"""`headstart data prepare` and `estimate` on a tiny verifier in a folder: what lands, what is refused, what is done twice."""

import json
import os
import shutil

import pytest
import yaml
from command import headstart
from safetensors.torch import load_file, save_file

from headstart import build_features
from headstart.build import build_verifier as load_verifier
from headstart.build_data import build_conversations, build_samples
from headstart.data import store
from headstart.data.chat import samples
from headstart.data.skips import Skips
from headstart.data.spool import Chosen, Spool
from headstart.errors import UserError
from headstart.training.recipe import load_recipe

EAGLE3 = {"kind": "eagle3", "layers": [1, 2], "depth": 2}
MEDUSA = {"kind": "medusa", "heads": 2}
ROWS = 24


@pytest.fixture
def model(tmp_path, tiny, make_tokenizer):
    folder = tmp_path / "verifier"
    tokenizer = make_tokenizer()
    tiny("llama", vocab_size=len(tokenizer)).model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def write(model, tmp_path):
    """`write(features, head)`: a recipe over 24 chats, of which one has no answer."""

    def write_recipe(features, head=EAGLE3, **data):
        chats = tmp_path / "chats.jsonl"
        if not chats.exists():
            rows = [{"prompt": f"say {i} " * (i % 5 + 1), "response": "yes ok no " * (i % 7 + 3)} for i in range(ROWS)]
            del rows[5]["response"]
            chats.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        recipe = {
            "verifier": {"model": str(model), "dtype": "float32", "device": "cpu"},
            "data": {"train": [str(chats)], "holdout": 0.1, "max_length": 100, "features": features} | data,
            "head": head,
            "training": {"steps": 2, "learning_rate": 1e-3, "batch_tokens": 200},
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        return path

    return write_recipe


def of_json(*arguments):
    ended = headstart(*arguments, "--json")
    assert ended.code == 0, ended
    return json.loads(ended.out)


def refused(*arguments):
    ended = headstart(*arguments)
    assert ended.code == 2, ended
    return ended.err.splitlines()[-1].removeprefix("error: ")


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8", "float32"])
@pytest.mark.parametrize("head", [EAGLE3, MEDUSA], ids=["eagle3", "medusa"])
def test_case_38_estimate_then_prepare(dtype, head, write, tmp_path):
    folder = tmp_path / "features"
    recipe = write({"stored": str(folder), "dtype": dtype}, head)
    before = of_json("data", "estimate", recipe)
    assert not folder.exists()  # nothing is written
    prepared = of_json("data", "prepare", recipe)
    landed = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert before["disk_bytes"] == pytest.approx(landed, rel=0.05)
    assert prepared["stored"] == {"folder": str(folder), "shards": 1, "bytes": landed}
    assert {name: before[name] for name in ("samples", "tokens", "supervised")} == {
        name: prepared[name] for name in ("samples", "tokens", "supervised")
    }
    assert (prepared["rows"], prepared["held_out"]) == (ROWS, 2)
    assert prepared["samples"] + sum(prepared["skipped"].values()) == ROWS - 2
    after = of_json("data", "estimate", recipe)
    assert after["disk_there_bytes"] == landed
    assert after["seconds"] < 0.2 * max(before["seconds"], 0.1) + 0.1
    shown = headstart("data", "estimate", recipe)
    assert shown.code == 0
    assert f"{landed / 1e6:,.1f}" in shown.out


def test_a_second_prepare_and_training_leave_the_verifiers_layers_alone(write, tmp_path, monkeypatch):
    recipe = write({"stored": str(tmp_path / "features")})
    of_json("data", "prepare", recipe)
    checked = load_recipe(recipe)
    verifier = load_verifier(checked)

    def refuse(*_, **__):
        raise AssertionError("the verifier ran")

    monkeypatch.setattr(verifier.decoder, "forward", refuse)
    training, source = build_samples(checked, verifier, build_conversations(checked))
    build_features.fill_features(source)
    batch, features = source.load(range(len(training)))
    assert features.layers.shape == (*batch.ids.shape, 64)


def test_training_on_stored_features_is_training_on_those_in_memory(write, tmp_path):
    """float32: the same head to the last bits that padding changes."""
    heads = {}
    for name, features in (("stored", {"stored": str(tmp_path / "f"), "dtype": "float32"}), ("memory", "memory")):
        recipe = write(features)
        ended = headstart("train", recipe, "--run-folder", tmp_path / name, "evaluation.max_new_tokens=4")
        assert ended.code == 0, ended.err
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        heads[name] = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    assert heads["stored"] == pytest.approx(heads["memory"], rel=1e-5)


def change_template(recipe, model, tmp_path):
    """One character."""
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>", "<|im_end|> ", 1))
    return [], "template", None


def change_weights(recipe, model, tmp_path):
    """One number, under the same path."""
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][3] += 0.01
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return [], "verifier", None


def change_file(recipe, model, tmp_path):
    """Same size, same time of change."""
    chats = tmp_path / "chats.jsonl"
    stat, text = chats.stat(), chats.read_text()
    changed = text.replace("yes ok no", "yes no ok", 1)
    assert len(changed) == len(text)
    chats.write_text(changed)
    os.utime(chats, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return [], "samples", None


CHANGES = {
    "template": change_template,
    "weights": change_weights,
    "file": change_file,
    "dtype": lambda *_: (["verifier.dtype=bfloat16"], "verifier", None),
    "storage": lambda recipe, *_: ([stored_in(recipe, "int8")], "dtype", "bfloat16 there, int8 here"),
    "layers": lambda *_: (["head.layers=[1, 3]"], "layers", "[1, 2] there, [1, 3] here"),
    "head": lambda *_: (["head={kind: medusa}"], "last", "before supervised tokens there, every token here"),
    "length": lambda *_: (["data.max_length=40"], "max_length", "100 there, 40 here"),
    "holdout": lambda *_: (["data.holdout=0.2"], "samples", None),
}


def stored_in(recipe, dtype):
    folder = load_recipe(recipe).data.features.stored
    return f"data.features={{stored: {folder}, dtype: {dtype}}}"


@pytest.mark.parametrize("name", CHANGES)
def test_case_39_a_stale_store_is_refused_by_name(name, write, model, tmp_path):
    recipe = write({"stored": str(tmp_path / "features")})
    of_json("data", "prepare", recipe)
    overrides, field, values = CHANGES[name](recipe, model, tmp_path)
    for verb in ("prepare", "estimate"):
        told = refused("data", verb, recipe, *overrides)
        assert told.startswith(f"{tmp_path / 'features'} holds features of something else (")
        assert f"{field}: {values or ''}" in told
        assert " there, " in told


def test_a_verifier_that_moved_is_the_same(write, model, tmp_path):
    recipe = write({"stored": str(tmp_path / "features")})
    first = of_json("data", "prepare", recipe)
    shutil.move(model, tmp_path / "elsewhere")
    assert of_json("data", "prepare", recipe, f"verifier.model={tmp_path / 'elsewhere'}") == first


def test_case_39_another_mask_rule_is_refused(write, tmp_path, monkeypatch):
    recipe = write({"stored": str(tmp_path / "features")})
    of_json("data", "prepare", recipe)
    monkeypatch.setattr(build_features, "MASK_RULE", "every token")
    assert "mask: assistant turns with their end of turn there, every token here" in refused("data", "prepare", recipe)


def test_what_does_not_fit_is_refused_before_anything_is_written(write, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "free_bytes", lambda folder: 1000)
    recipe = write({"stored": str(tmp_path / "features")})
    for arguments in (
        ("data", "estimate", recipe),
        ("data", "prepare", recipe),
        ("train", recipe, "--run-folder", tmp_path / "r"),
    ):
        assert "needs 0.00 GB more and the disk has 0.00 GB free; set keep" in refused(*arguments)
    assert not (tmp_path / "features").exists()
    assert not (tmp_path / "r").exists()


def test_a_budget_bounds_the_estimate(write, tmp_path):
    recipe = write({"stored": str(tmp_path / "features"), "keep": "0.05 MB"})
    assert of_json("data", "estimate", recipe)["disk_bytes"] == 50_000


def test_answers_are_counted_at_their_longest_until_they_are_written(write, tmp_path):
    recipe = write({"stored": str(tmp_path / "features")}, answers="regenerate", answer_tokens=6)
    before = of_json("data", "estimate", recipe)
    assert before["at_most"] is True
    prepared = of_json("data", "prepare", recipe)
    after = of_json("data", "estimate", recipe)
    assert after["at_most"] is False
    assert after["disk_bytes"] == pytest.approx(prepared["stored"]["bytes"], rel=0.05)
    assert all(after[name] == prepared[name] for name in ("samples", "tokens", "supervised"))
    assert before["disk_bytes"] >= after["disk_bytes"]
    assert after["seconds"] <= before["seconds"]


@pytest.mark.parametrize("features", ["online", "memory"])
def test_prepare_without_a_store_counts_and_writes_nothing(features, write, tmp_path, make_tokenizer):
    recipe = write(features)
    there = sorted(tmp_path.iterdir())
    prepared = of_json("data", "prepare", recipe)
    assert "stored" not in prepared
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "cache"] == there
    conversations = build_conversations(load_recipe(recipe))
    expected = list(samples(make_tokenizer(), conversations.train, 100, Skips()))
    assert prepared["tokens"] == sum(len(sample.ids) for sample in expected)
    assert prepared["supervised"] == sum(sum(sample.mask) for sample in expected)
    held = of_json("data", "estimate", recipe)["memory_bytes"]
    model = load_verifier(load_recipe(recipe)).model
    weights = sum(p.numel() for p in model.parameters()) * 4
    weights += sum(m.weight.numel() for m in model.modules() if hasattr(m, "packed")) * 4  # laid out twice on a CPU
    each = 3 * 32 * 4 + 8  # two layers and the last, and the choice
    assert held - weights == each * (200 if features == "online" else prepared["tokens"])


def test_a_spool_is_the_sequence_it_was_made_of(tmp_path):
    items = [{"a": i, "text": "x" * i} for i in range(50)]
    spool = Spool(iter(items), tmp_path)
    assert (len(spool), list(spool), spool[7], spool[-1], spool[3:6]) == (50, items, items[7], items[-1], items[3:6])
    with pytest.raises(IndexError):
        spool[50]
    chosen = Chosen(spool, [4, 2, 49])
    assert (len(chosen), list(chosen), chosen[1:]) == (3, [items[4], items[2], items[49]], [items[2], items[49]])
    assert list(tmp_path.iterdir()) == []
    assert list(Spool([], tmp_path)) == []


def test_features_in_a_recipe(write, tmp_path):
    recipe = write({"stored": "x", "dtype": "int8", "keep": "1.5 GB"})
    features = load_recipe(recipe).data.features
    assert (features.stored, features.dtype, features.keep_bytes) == ("x", "int8", 1_500_000_000)
    for value, told in {
        "disk": "must be online, memory or a section such as {stored: FOLDER}, got 'disk'",
        "{dtype: int8}": "data.features.stored: missing; the folder to write them to",
        "{stored: x, dtype: int4}": "data.features.dtype: must be one of bfloat16, float8, int8, float32, got 'int4'",
        "{stored: x, keep: 200}": "data.features.keep: must be text, got 200",
        "{stored: x, keep: 200 gigs}": "data.features.keep: must be a size such as 200GB",
        "{stored: x, kep: 200GB}": "data.features.kep: unknown key; did you mean 'keep'?",
    }.items():
        with pytest.raises(UserError) as caught:
            load_recipe(recipe, [f"data.features={value}"])
        assert told in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1
