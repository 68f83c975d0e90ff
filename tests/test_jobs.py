"""`headstart train`, `eval` and `report` from a chat file to a page, in this process, on a tiny model in a folder."""

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command import headstart
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from headstart.data.packing import batch_plan
from headstart.errors import UserError
from headstart.evaluation import lossless, verify
from headstart.heads.hub import load_head
from headstart.judging import lossless as lossless_job
from headstart.runs import claim, differences
from headstart.training.checkpoint import Checkpoints
from headstart.training.recipe import load_recipe
from headstart.training.trainer import fit

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
STOP = 3
HEADS = {
    "medusa": {"kind": "medusa", "heads": 3, "lm_head": "shared", "targets": "soft", "vocabulary": 40},
    "eagle3": {"kind": "eagle3", "layers": [1, 2, 3], "draft_vocabulary": 40, "depth": 3},
}
MORE_HEADS = {
    "eagle3.1": HEADS["eagle3"] | {"fc_norm": True, "norm_output": True},
    "eagle1": {"kind": "eagle1", "vocabulary": 40},
    "hass": {"kind": "eagle1", "depth": 3, "top_tokens": 10},  # through the verifier's whole lm_head
    **{form: {"kind": "mtp", "form": form, "vocabulary": 40} for form in ("parallel", "sequential", "recursive")},
}
ROWS = [
    {"id": f"chat-{i}", "category": ("maths", "chat")[i % 2], "split": "holdout" if i % 4 == 0 else "train",
     "messages": [{"role": "user", "content": f"what is {i}?"}, {"role": "assistant", "content": "an answer of the file"}]}
    for i in range(16)
]  # fmt: skip


def refused(*arguments: object) -> str:
    """The one line of a command that exits with 2."""
    ended = headstart(*arguments)
    assert ended.code == 2, ended
    *told, last = ended.err.splitlines()
    assert last.startswith("error: ")
    assert not any(line.startswith(("error", "Traceback")) for line in told)
    return last.removeprefix("error: ")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The answers of the verifier, for all tests here."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADSTART_CACHE", str(folder))
        patch.setenv("COLUMNS", "200")
        yield folder


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama that writes a few letters, with a tokenizer of bytes beside it."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    bytes_only = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<|im_end|>", chat_template=CHATML)
    config = LlamaConfig(
        vocab_size=len(vocab), hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.5, max_position_embeddings=256, bos_token_id=0, eos_token_id=STOP,
        pad_token_id=STOP,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    spoken = {STOP, *(vocab[letter] for letter in "abcdefghijkl")}
    with torch.no_grad():
        model.lm_head.weight[sorted(set(range(len(vocab))) - spoken)] = 0.0
        model.lm_head.weight[STOP] *= 0.6
    folder = tmp_path_factory.mktemp("verifier")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def write_recipe(verifier: Path, tmp_path: Path) -> Callable[..., Path]:
    """`write_recipe(kind, **changes)`: a recipe file; section__key=value changes it. The chats lie in chat.jsonl."""

    def write(kind: str, folder: Path = tmp_path, **changes: Any) -> Path:
        folder.mkdir(exist_ok=True)
        chats = folder / "chat.jsonl"
        if not chats.exists():
            chats.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
        recipe: dict[str, Any] = {
            "verifier": {"model": str(verifier), "dtype": "float32", "device": "cpu"},
            "data": {"train": [str(chats)], "holdout": "split", "max_length": 128, "answers": "regenerate",
                     "answer_tokens": 16, "features": "memory"},
            "head": (HEADS | MORE_HEADS)[kind],
            "training": {"steps": 6, "batch_tokens": 300, "learning_rate": 5e-3, "log_every": 2, "save_every": 3,
                         "evaluate_every": 3},
            "evaluation": {
                "trees": [{"kind": "chain", "depth": 3}, {"kind": "static", "paths": [[0], [1], [0, 0], [1, 0]]},
                          {"kind": "dynamic", "depth": 3, "top_k": 3, "nodes": 8}],
                "max_new_tokens": 24, "batch": 4, "timing_prompts": 1,
            },
        }  # fmt: skip
        for name, value in changes.items():
            section, _, key = name.partition("__")
            recipe[section] = recipe[section] | {key: value}  # HEADS stay as they are
        path = folder / f"{kind}.yaml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize("kind", [*HEADS, *MORE_HEADS])
def test_a_head_from_chat_file_to_page(kind: str, write_recipe: Callable[..., Path], verifier: Path, tmp_path: Path) -> None:
    recipe, folder = write_recipe(kind), tmp_path / "runs" / kind
    trained = headstart("train", recipe, "--run-folder", folder)
    assert trained.code == 0, trained.err
    assert "training on 12 samples: " in trained.err
    assert set(files(folder)) >= {
        "recipe.yaml", "metrics.jsonl", "head/config.json", "head/model.safetensors", "checkpoints/step-6/head.safetensors",
    }  # fmt: skip
    assert load_recipe(folder / "recipe.yaml") == load_recipe(recipe)
    metrics = lines(folder / "metrics.jsonl")
    assert [(line["step"], "held_out" in line) for line in metrics] == [
        (2, False),
        (3, True),
        (4, False),
        (6, False),
        (6, True),
    ]

    judged = headstart("eval", folder, "--json")
    assert judged.code == 0, judged.err
    evaluation = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    assert json.loads(judged.out) == evaluation
    head = load_head(folder / "head")
    assert set(evaluation) == {"verifier", "head", "prompts", "max_new_tokens", "dtype", "device", "seconds", "results"}
    assert evaluation["verifier"] == str(verifier)
    assert evaluation["head"]["kind"] == (HEADS | MORE_HEADS)[kind]["kind"]
    assert evaluation["head"]["parameters"] == sum(p.numel() for p in head.parameters())
    assert evaluation["head"]["draft_vocab_size"] == len(head.target_ids) == (260 if kind == "hass" else 40)
    assert STOP in head.target_ids
    assert (evaluation["prompts"], evaluation["max_new_tokens"]) == (4, 24)
    assert (evaluation["dtype"], evaluation["device"]) == ("float32", "cpu")
    assert [result["tree"]["kind"] for result in evaluation["results"]] == ["chain", "static", "dynamic"]
    for result in evaluation["results"]:
        assert result["identical_to_greedy"] is True
        assert result["speedup"] > 0
        assert set(result["by_category"]) <= {"maths", "chat"}
    # training judged with the last tree on the same prompts: the head that was kept is the one it liked best
    best = max(line["held_out"]["tau"] for line in metrics if "held_out" in line)
    assert evaluation["results"][0]["tau"] == pytest.approx(best)

    examined = headstart("doctor", folder, "--json")
    assert examined.code == 0, examined.out
    diagnosis = json.loads(examined.out)
    assert [check["healthy"] for check in diagnosis["checks"]] == [True] * 9
    assert (diagnosis["healthy"], diagnosis["first"]) == (True, None)
    assert diagnosis["accuracy"]["logged"] == [line for line in metrics if "loss" in line][-1]["accuracy_by_depth"]

    analysed = headstart("analyse", folder, "--prompts", 2)
    assert analysed.code == 0, analysed.err
    assert analysed.out.splitlines()[-1].rstrip() == f"pictures: {folder / 'report.html'}"
    analysis = json.loads((folder / "analysis.json").read_text(encoding="utf-8"))
    assert [look["step"] for look in analysis["stages"]["looks"]] == [3, 6]
    assert analysis["lengths"]["measured"][0]["tau"] == evaluation["results"][0]["tau"]
    assert len(analysis["top_k"]) == 3

    reported = headstart("report", folder)
    assert (reported.code, reported.out.strip()) == (0, str(folder / "report.html"))
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>")
    assert evaluation["head"]["kind"] in page
    terms = {"eagle1": ["regression", "cross_entropy"], "hass": ["regression", "cross_entropy", "top_tokens"]}.get(kind, [])
    for line in (line for line in metrics if "loss" in line):
        assert [name for name in line if name.endswith("_by_depth")] == [
            f"{name}_by_depth" for name in ("loss", *terms, "accuracy")
        ]


def test_the_doctor_names_what_was_changed_after_training(
    write_recipe: Callable[..., Path], verifier: Path, tmp_path: Path
) -> None:  # fmt: skip
    """The verifier's chat template and weights, the head's layer ids, its vocabulary; a run without a record is judged by what
    it does."""
    shutil.copytree(verifier, tmp_path / "verifier")
    folder, record, config = (tmp_path / name for name in ("run", "run/provenance.json", "run/head/config.json"))
    recipe = write_recipe("eagle3", verifier__model=str(tmp_path / "verifier"), training__steps=1)
    assert headstart("train", recipe, "--run-folder", folder).code == 0

    def finds(cause: str | None) -> None:
        ended = headstart("doctor", folder)
        assert ended.code == (0 if cause is None else 1), ended.out
        last = ended.out.splitlines()[-1].rstrip()
        assert last.endswith("training and decoding agree" if cause is None else f"likely cause: {cause}")

    finds(None)
    trained = config.read_text(encoding="utf-8")
    config.write_text(json.dumps(json.loads(trained) | {"layers": [1, 2, 2]}), encoding="utf-8")
    finds("layer ids")
    config.write_text(trained, encoding="utf-8")

    (template,) = [path for path in (tmp_path / "verifier").iterdir() if path.name == "chat_template.jinja"]
    template.write_text(CHATML.replace("system", "") + "{# another #}", encoding="utf-8")
    finds("template")
    template.write_text(CHATML, encoding="utf-8")

    weights = folder / "head" / "model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"target_ids": tensors["target_ids"].flip(0).contiguous()}, weights)
    finds("vocabulary map")
    twice = tensors["target_ids"].clone()
    twice[1] = twice[0]
    save_file(tensors | {"target_ids": twice}, weights)
    finds("vocabulary map")
    for command in ("eval", "lossless"):  # siblings may be the same token: nothing would be lossless
        assert refused(command, folder) == (
            f"the head's vocabulary (target_ids) cannot be drafted from: id {int(twice[0])} stands there 2 times"
        )
    save_file(tensors, weights)

    model = tmp_path / "verifier" / "model.safetensors"
    its = load_file(model)
    other = {name: tensor * 1.01 if name == "model.norm.weight" else tensor for name, tensor in its.items()}
    save_file(other, model, metadata={"format": "pt"})
    finds("verifier")
    save_file(its, model, metadata={"format": "pt"})

    record.unlink()
    finds(None)
    record.write_text("{", encoding="utf-8")
    assert refused("doctor", folder).startswith(f"{record}:1: not JSON: ")
    for odd, told in (("[1]", "must be a JSON object"), ('{"verifier": 3}', "verifier: "), ('{"head": 2}', "verifier: Field")):
        record.write_text(odd, encoding="utf-8")
        assert refused("doctor", folder).startswith(f"{record}: {told}")
    record.unlink()
    metrics = folder / "metrics.jsonl"
    for odd, told in (('{"step": 7, "lo', "not JSON: "), ("3", "must be a JSON object")):
        metrics.write_text(odd, encoding="utf-8")
        assert refused("doctor", folder).startswith(f"{metrics}:1: {told}")
    metrics.unlink()
    finds(None)
    assert refused("doctor", folder, "--tokens", 100_000).startswith("--tokens 100000: no held-out prompt leaves room")
    assert refused("analyse", folder).startswith(f"{metrics}: no such file")


@pytest.mark.parametrize("kind", HEADS)
def test_lossless_of_a_run(
    kind: str, write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof and the run's own gates; a decoding loop with a fault ends with 1, a folder that is no run with 2."""
    recipe, folder = write_recipe(kind, evaluation__batch=32), tmp_path / "run"
    assert headstart("train", recipe, "--run-folder", folder).code == 0
    before = files(folder)
    monkeypatch.setattr("headstart.judging.proof", lambda seed: iter(lossless.one_node(seed)))  # the rest has a test of its own
    proved = headstart("lossless", folder, "--tokens", 14_000, "--json")
    assert proved.code == 0, proved.out
    gates = json.loads(proved.out)["gates"]
    assert {gate["part"] for gate in gates} == {"one node", "wrong rules", "own model"}
    own = [gate for gate in gates if gate["part"] == "own model"]
    assert [gate["name"] for gate in own[:3]] == [
        f"head, greedy, {tree}, float32" for tree in ("chain of 4 nodes", "static of 5 nodes", "dynamic of 8 nodes")
    ]
    assert [gate["measure"] for gate in own[3:]] == ["chi-square p"] * 7  # two rules for two trees, one for the third
    assert int(own[-2]["note"].split()[0]) >= 14_000
    assert own[-1]["name"].startswith("planted bias")
    assert files(folder) == before

    honest = verify.candidates_law
    monkeypatch.setattr(
        verify, "candidates_law", lambda p, children: honest(p.square() / p.square().sum(1, keepdim=True), children)
    )
    failed = headstart(
        "lossless", folder, "evaluation.temperatures=[0, 1.0]", "--drafter", "head", "--tree", "chain:3", "--tokens", 5000
    )
    assert failed.code == 1
    line = next(line for line in failed.out.splitlines() if "candidates, chain of 4 nodes" in line)
    assert "FAILED" in line

    shutil.rmtree(folder / "head")
    assert "head" in refused("lossless", folder)
    assert refused("lossless", "--drafter", "head").startswith("--drafter and --tree: of what run?")
    assert refused("lossless", folder, "training.steps=9").startswith("override: training.steps: the head is trained; ")
    assert refused("lossless", tmp_path).endswith("not a run folder (no recipe.yaml in it); `headstart train` writes one")


def test_lossless_below_float32_judges_in_both(
    write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 may part from itself at near ties only, and float32 not at all."""
    monkeypatch.setattr("headstart.judging.proof", lambda seed: iter(()))
    recipe, folder = write_recipe("medusa", verifier__dtype="bfloat16"), tmp_path / "run"
    assert headstart("train", recipe, "--run-folder", folder).code == 0
    gates = [gate for gate in lossless_job(folder, 1000) if gate.name.startswith("head, greedy, ")]
    assert [gate.name.rpartition(", ")[2] for gate in gates] == ["float32"] * 3 + ["bfloat16"] * 3
    assert all(gate.passed for gate in gates), gates


def test_training_again_changes_nothing(write_recipe: Callable[..., Path], cache: Path, tmp_path: Path) -> None:
    recipe, folder = write_recipe("eagle3", evaluation__timing_prompts=0), tmp_path / "run"
    assert headstart("train", recipe, "--run-folder", folder).code == 0
    assert headstart("eval", folder).code == 0
    before = files(folder) | files(cache)
    again = headstart("train", recipe, "--run-folder", folder)
    assert again.code == 0, again.err
    assert files(folder) | files(cache) == before


@pytest.mark.parametrize("features", ["online", "memory"])
def test_packing_changes_rows_and_nothing_else(features: str, write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    """One step on all samples: the same loss by depth, labels and gradient, in fewer rows."""
    found = []
    for packing in (False, True):
        recipe = write_recipe(
            "eagle3", data__features=features, data__packing=packing, training__steps=1, training__batch_tokens=10_000,
            training__log_every=1,
        )  # fmt: skip
        folder = tmp_path / f"packing-{packing}"
        assert headstart("train", recipe, "--run-folder", folder).code == 0
        found.append(lines(folder / "metrics.jsonl")[0])
    alone, packed = found
    assert packed["supervised_tokens"] == alone["supervised_tokens"] > 100
    assert packed["loss_by_depth"] == pytest.approx(alone["loss_by_depth"], rel=1e-5)
    assert packed["accuracy_by_depth"] == alone["accuracy_by_depth"]
    assert packed["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(("kind", "packing"), [("eagle3", False), ("eagle1", False), ("eagle3", True)])
def test_a_killed_run_goes_on(
    kind: str, packing: bool, write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the checkpoint of step 3; what follows is the run that was never stopped, EAGLE-1's noise included."""
    recipe = write_recipe(kind, data__features="online", data__packing=packing)
    assert headstart("train", recipe, "--run-folder", tmp_path / "straight").code == 0
    save = Checkpoints.save

    def save_and_die(self: Checkpoints, *arguments: Any) -> None:
        save(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "save", save_and_die)
    killed = headstart("train", recipe, "--run-folder", tmp_path / "killed")
    assert (killed.code, killed.err.splitlines()[-1]) == (130, "interrupted")
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()] == ["step-3"]
    resumed = headstart("train", recipe, "--run-folder", tmp_path / "killed")
    assert resumed.code == 0, resumed.err
    straight, killed_then = (load_file(tmp_path / name / "head" / "model.safetensors") for name in ("straight", "killed"))
    assert all(killed_then[name].equal(tensor) for name, tensor in straight.items())
    assert straight.keys() == killed_then.keys()
    steps = [(line["step"], "held_out" in line) for line in lines(tmp_path / "killed" / "metrics.jsonl")]
    assert steps == [(line["step"], "held_out" in line) for line in lines(tmp_path / "straight" / "metrics.jsonl")]


def test_the_answers_of_the_file_may_be_kept(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    recipe = write_recipe(
        "medusa", data__answers="keep", data__features="online", data__holdout=0.25, training__steps=1,
        training__evaluate_seconds=1e-6, evaluation__batch=1,
    )  # fmt: skip
    trained = headstart("train", recipe, "--run-folder", tmp_path / "run")
    assert trained.code == 0, trained.err
    (look,) = [line["held_out"] for line in lines(tmp_path / "run" / "metrics.jsonl") if "held_out" in line]
    assert (look["prompts"], look["of"], len(look["by_prompt"]), len(look["survival"])) == (1, 4, 1, 3)  # what the time is for
    assert {"tau", "alpha", "kl", "conditional"} <= set(look)
    assert "held out: 1 of 4 prompts fit into training.evaluate_seconds" in trained.err.replace("\n", " ")
    learned = 12 * (len("an answer of the file") + 1)
    assert f"{learned} supervised" in trained.err
    told = re.search(r"the verifier would choose (\d+)\.\d% of 264 supervised tokens itself", trained.err)
    assert told
    assert int(told[1]) < 50  # a random model and English words
    assert "warning: only " in trained.err


def test_another_recipe_in_the_same_folder_is_refused(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert headstart("train", write_recipe("medusa", training__steps=1), "--run-folder", folder).code == 0
    before = files(folder)
    other = write_recipe("medusa", training__steps=2, training__learning_rate=1e-4)
    assert refused("train", other, "--run-folder", folder) == (
        f"{folder} holds a run of another recipe (training.steps: 1 there, 2 here; training.learning_rate: 0.005 there, "
        "0.0001 here); choose another run folder or delete it"
    )
    assert refused("train", write_recipe("eagle3", training__steps=1), "--run-folder", folder).startswith(
        f"{folder} holds a run of another recipe (head.kind: medusa there, eagle3 here; "
    )
    assert files(folder) == before


def test_a_folder_of_something_else_is_refused(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "cat.jpg").write_bytes(b"cat")
    message = refused("train", write_recipe("medusa"), "--run-folder", folder)
    assert message == f"{folder} is not empty and no run folder (no recipe.yaml in it); choose another"
    assert files(folder) == {"cat.jpg": b"cat"}


Spoil = Callable[[Callable[..., Path], Path], tuple[Path, str]]


def missing_file(write: Callable[..., Path], folder: Path) -> tuple[Path, str]:
    gone = folder / "gone.jsonl"
    return write("medusa", data__train=[str(gone)]), f"{gone}: no such file"


def broken_line(write: Callable[..., Path], folder: Path) -> tuple[Path, str]:
    path = folder / "broken.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n\n" + json.dumps(ROWS[1]) + "\n" + '{"messages": [\n', encoding="utf-8")
    return write("medusa", data__train=[str(path)]), f"{path}:4: broken JSON: "


def too_short(write: Callable[..., Path], folder: Path) -> tuple[Path, str]:
    reason = "12 of 12 rows have no supervised token after max_length=8; raise data.max_length"
    return write("medusa", data__max_length=8), reason


def too_short_to_keep(write: Callable[..., Path], folder: Path) -> tuple[Path, str]:
    reason = "12 of 12 rows have no supervised token after max_length=8; raise max_length"
    return write("medusa", data__max_length=8, data__answers="keep"), reason


def no_model(write: Callable[..., Path], folder: Path) -> tuple[Path, str]:
    return write("medusa", verifier__model=str(folder / "gone")), f"verifier {folder / 'gone'}: no such folder"


def nothing_held_out(write: Callable[..., Path], folder: Path) -> tuple[Path, str]:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS if row["split"] == "train"), encoding="utf-8")
    return write("medusa", data__train=[str(path)]), "data.holdout: split leaves 12 conversations to train on and 0 held out"


def evaluation_line(recipe: Path) -> str:
    return f"{recipe}:{recipe.read_text(encoding='utf-8').splitlines().index('evaluation:') + 1}: evaluation: "


def too_deep(write: Callable[..., Path], folder: Path) -> tuple[Path, str]:
    recipe = write("medusa", evaluation__trees=[{"kind": "chain", "depth": 4}])
    return recipe, evaluation_line(recipe) + "a chain tree of depth 4 needs as many heads; this head has 3"


def too_wide(write: Callable[..., Path], folder: Path) -> tuple[Path, str]:
    tree = {"kind": "dynamic", "depth": 2, "top_k": 9, "nodes": 12}
    recipe = write("medusa", head__vocabulary=8, evaluation__trees=[tree])
    return recipe, (evaluation_line(recipe) + "a dynamic tree with 9 children a node needs as large a draft "
                    "vocabulary; this head has 8 tokens")  # fmt: skip


def too_long(write: Callable[..., Path], folder: Path) -> tuple[Path, str]:
    return write("medusa", evaluation__max_new_tokens=250), "evaluation: prompt chat-0 has "


def no_prompts(write: Callable[..., Path], folder: Path) -> tuple[Path, str]:
    """Found before the verifier has answered anything."""
    gone = folder / "prompts.jsonl"
    return write("medusa", evaluation__prompt_files=[str(gone)], verifier__model=str(folder / "gone")), f"{gone}: no such file"


def no_start(write: Callable[..., Path], folder: Path) -> tuple[Path, str]:
    return write("medusa", head__start=str(folder / "gone")), f"{folder / 'gone'}: no such folder"


SPOILED = [
    missing_file, broken_line, too_short, too_short_to_keep, no_model, nothing_held_out, too_deep, too_wide, too_long,
    no_prompts, no_start,
]  # fmt: skip


UNFIT: list[tuple[str, dict[str, Any], str]] = [
    ("medusa", {"evaluation__drafters": ["head", "truncated:9"]}, "truncated: 9 layers; verifier "),
    ("medusa", {"evaluation__drafters": ["head", "model:/no/such"]}, "verifier /no/such: no such folder"),
    ("eagle3", {"head__draft_vocabulary": 500}, "draft vocabulary of 500: must hold the 2 special tokens and fit in the "),
    ("hass", {"head__top_tokens": 300}, "head.top_tokens: 300 in the recipe; the head knows 260 tokens"),
    ("hass", {"evaluation__trees": [{"kind": "dynamic", "depth": 2, "top_k": 300, "nodes": 9}]},
     "evaluation.trees: a dynamic tree asks for 300 children of a node; its drafter knows 260 tokens"),
    ("recursive", {"head__start": "verifier"}, "verifier {verifier}: head.start: it brings 0 modules"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "told"), UNFIT)
def test_what_could_not_be_judged_in_the_end_is_told_before_the_verifier_answers(
    kind: str, changes: dict[str, Any], told: str, write_recipe: Callable[..., Path], verifier: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def answers(*arguments: Any) -> None:
        raise AssertionError("the verifier was asked")

    monkeypatch.setattr("headstart.workshop.build_samples", answers)
    message = refused("train", write_recipe(kind, **changes), "--run-folder", tmp_path / "run")
    assert message.startswith(told.format(verifier=verifier))
    assert not (tmp_path / "run").exists()


def test_a_draft_model_with_another_tokenizer_is_told_before_training(
    write_recipe: Callable[..., Path], verifier: Path, tmp_path: Path
) -> None:
    shutil.copytree(verifier, tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace("<|im_start|>", "<|begin|>"), encoding="utf-8")
    recipe = write_recipe("medusa", evaluation__drafters=["head", f"model:{tmp_path / 'other'}"])
    assert refused("train", recipe, "--run-folder", tmp_path / "run") == (
        f"draft model {tmp_path / 'other'}: its tokenizer is not the verifier's: '<|begin|>' is 2 there and None here; it must "
        "be the same"
    )


def test_a_dry_run_takes_the_steps_of_training_and_leaves_no_store(
    write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Packed rows, layers computed again and the adapter of Medusa-2, over ten steps."""
    seen: list[Any] = []

    def watched(head: Any, verifier: Any, source: Any, plan: Any, *rest: Any) -> Any:
        seen.append((head, source, plan))
        return fit(head, verifier, source, plan, *rest)

    monkeypatch.setattr("headstart.planning.fit", watched)
    recipe = write_recipe(
        "medusa", head__adapter={"rank": 2}, data__features={"stored": str(tmp_path / "store")}, data__answers="keep",
        data__packing=True, training__gradient_checkpointing=True,
    )  # fmt: skip
    ended = headstart("train", recipe, "--dry-run", "--json")
    assert ended.code == 0, ended
    assert json.loads(ended.out)["tokens_per_second"] > 0
    ((head, source, plan),) = seen
    assert type(head).__name__ == "AdaptedMedusa"
    assert head.recompute
    assert type(source).__name__ == "OriginalFeatures"
    settings = load_recipe(recipe).training
    lengths = [len(sample.ids) for sample in source.source.samples]
    assert plan == batch_plan(lengths, settings.batch_tokens, settings.seed, 10, None, packing=True)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
def test_bad_input_is_one_line_and_exit_2(spoil: Spoil, write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    recipe, expected = spoil(write_recipe, tmp_path)
    assert refused("train", recipe, "--run-folder", tmp_path / "run").startswith(expected)
    assert not set(files(tmp_path)) & {"run/metrics.jsonl", "run/head/config.json", "run/evaluation.json"}


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
def test_a_refused_recipe_leaves_no_run_folder(spoil: Spoil, write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    """Else the mended recipe would be refused as another run's."""
    recipe, _ = spoil(write_recipe, tmp_path)
    refused("train", recipe, "--run-folder", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_cannot_be_is_told_before_anything_is_loaded(
    write_recipe: Callable[..., Path], tmp_path: Path
) -> None:  # fmt: skip
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    recipe = write_recipe("medusa", verifier__model=str(tmp_path / "gone"))
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        assert refused("train", recipe, "--run-folder", place) == f"{place}: cannot be written: Not a directory"
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


def test_eval_of_a_run_that_has_no_head_yet(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    claim(folder, load_recipe(write_recipe("medusa")))
    assert refused("eval", folder) == f"{folder / 'head'}: not a draft head: config.json is missing"
    assert set(files(folder)) == {"recipe.yaml"}


def test_eval_with_another_budget_and_another_verifier(
    write_recipe: Callable[..., Path], verifier: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert headstart("train", write_recipe("medusa", training__steps=1), "--run-folder", folder).code == 0
    ended = headstart("eval", folder, "evaluation.max_new_tokens=5", "evaluation.prompts=2", "evaluation.timing_prompts=0")
    assert ended.code == 0, ended.err
    evaluation = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    assert (evaluation["max_new_tokens"], evaluation["prompts"]) == (5, 2)
    assert evaluation["results"][0]["speedup"] is None
    assert "identical" in ended.out

    model = AutoModelForCausalLM.from_pretrained(verifier)
    wide = LlamaConfig(**(model.config.to_dict() | {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16}))
    AutoModelForCausalLM.from_config(wide).save_pretrained(tmp_path / "wide")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (verifier / name).exists():
            (tmp_path / "wide" / name).write_bytes((verifier / name).read_bytes())
    before = files(folder)
    message = refused("eval", folder, f"verifier.model={tmp_path / 'wide'}")
    assert message.endswith("do not fit: the head's hidden size is 32, the verifier's 64")
    assert files(folder) == before


def test_eval_of_one_token_answers(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    """No round, no tau: told as such."""
    folder = tmp_path / "run"
    assert headstart("train", write_recipe("medusa", training__steps=1), "--run-folder", folder).code == 0
    ended = headstart("eval", folder, "evaluation.max_new_tokens=1", "evaluation.timing_prompts=0")
    assert ended.code == 0, ended.err
    assert json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))["results"][0]["tau"] is None


def test_the_quickstart_trains_both_heads_and_goes_on_where_it_stopped(
    write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = {f"smollm2-135m/{kind}": write_recipe(kind, evaluation__timing_prompts=0) for kind in HEADS}
    monkeypatch.setattr("headstart.quickstart.shipped_recipes", lambda: shipped)
    drawn: list[list[Path]] = []
    monkeypatch.setattr("headstart.quickstart.write_report", lambda runs, page: drawn.append(runs) or page)
    folder = tmp_path / "runs"
    first = headstart("quickstart", "--run-folder", folder)
    assert first.code == 0, first.err
    assert first.out.splitlines()[-1] == f"report: {folder / 'report.html'}"
    assert first.err.count("training on 12 samples") == 1  # both heads learn from one reading
    for kind in HEADS:
        evaluation = json.loads((folder / kind / "evaluation.json").read_text(encoding="utf-8"))
        assert evaluation["head"]["kind"] == (HEADS | MORE_HEADS)[kind]["kind"]
        assert all(result["identical_to_greedy"] for result in evaluation["results"])
    before = files(folder)

    again = headstart("quickstart", "--run-folder", folder)
    assert again.code == 0, again.err
    assert again.err.count("already trained and evaluated") == 2
    assert files(folder) == before

    (folder / "medusa" / "evaluation.json").unlink()  # killed while it was judged
    resumed = headstart("quickstart", "--run-folder", folder)
    assert resumed.code == 0, resumed.err
    assert resumed.err.count("already trained and evaluated") == 1
    assert {name: data for name, data in files(folder).items() if name != "medusa/evaluation.json"} == {
        name: data for name, data in before.items() if name != "medusa/evaluation.json"
    }
    assert drawn == [[folder / "eagle3", folder / "medusa"]] * 3


def test_differences_are_dotted_keys_with_both_values() -> None:
    there = {"a": 1, "b": {"c": [1, 2], "d": None}, "e": {"f": 1}}
    here = {"a": 1, "b": {"c": [1, 3], "d": None, "g": 0}, "e": 5}
    assert differences(there, here) == [
        "b.c: [1, 2] there, [1, 3] here",
        "b.g: None there, 0 here",
        "e: {'f': 1} there, 5 here",
    ]
    assert differences(there, there) == []


def test_claim_writes_the_recipe_once(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe("medusa"))
    folder = tmp_path / "new" / "run"
    claim(folder, recipe)
    written = files(folder)
    claim(folder, recipe)
    assert files(folder) == written
    assert load_recipe(folder / "recipe.yaml") == recipe
    (tmp_path / "empty").mkdir()
    claim(tmp_path / "empty", recipe)
    with pytest.raises(UserError, match=r"training\.seed: 0 there, 1 here"):
        claim(folder, load_recipe(write_recipe("medusa", training__seed=1)))


def test_the_seed_decides_the_weights_and_the_holdout(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    """The same recipe in two folders is the same head; another seed is another one."""
    heads = []
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        recipe = write_recipe("eagle3", training__seed=seed, data__holdout=0.25, training__steps=2, data__features="online")
        assert headstart("train", recipe, "--run-folder", tmp_path / name).code == 0
        heads.append(load_file(tmp_path / name / "head" / "model.safetensors"))
    assert all(heads[0][name].equal(heads[1][name]) for name in heads[0])
    assert not heads[0]["fc.weight"].equal(heads[2]["fc.weight"])
    assert random.Random(0).sample(range(16), 4) != random.Random(1).sample(range(16), 4)
