"""Datasets through the library `datasets`, from local folders alone, and columns by other names."""

import json
import sys

import pytest

from headstart.data.conversations import read_conversations
from headstart.data.skips import Skips
from headstart.data.sources import dataset_source, file_source
from headstart.errors import UserError

datasets = pytest.importorskip("datasets")

QA = ({"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"})


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    datasets.disable_progress_bars()


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(source, skips=None, **more):
    return list(read_conversations([source], skips or Skips(), **more))


CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "clock", "arguments": {"x": 1}}]}


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_of_json_lines(tmp_path, streaming):
    write(tmp_path / "chats" / "train.jsonl",
          {"messages": list(QA), "category": "maths"}, {"messages": [], "category": None},
          {"messages": [QA[0], CALL], "category": None})  # fmt: skip
    skips = Skips()
    found = read(dataset_source(str(tmp_path / "chats"), streaming=streaming), skips)
    assert [one.messages for one in found] == [QA, (QA[0], {**CALL, "content": ""})]  # and no key that nobody wrote
    assert [(one.id, one.category, one.source) for one in found] == [
        ("chats-1", "maths", f"{tmp_path}/chats/train:1"),
        ("chats-3", None, f"{tmp_path}/chats/train:3"),
    ]
    assert (skips.read, skips.counts) == (3, {"no messages": 1})


def test_a_folder_of_parquet_has_splits_and_subsets(tmp_path):
    for subset in ("main", "other"):
        for split in ("train", "test"):
            rows = datasets.Dataset.from_list([{"question": f"{subset} {split}", "answer": "A"}])
            (tmp_path / "sums" / subset).mkdir(parents=True, exist_ok=True)
            rows.to_parquet(tmp_path / "sums" / subset / f"{split}.parquet")
    card = "---\nconfigs:\n" + "".join(
        f"- config_name: {subset}\n  data_files:\n"
        + "".join(f"  - split: {split}\n    path: {subset}/{split}.parquet\n" for split in ("train", "test"))
        for subset in ("main", "other")
    )
    (tmp_path / "sums" / "README.md").write_text(card + "---\n")
    (found,) = read(dataset_source(str(tmp_path / "sums"), "other", "test"))
    assert found.messages[0]["content"] == "other test"
    assert found.source == f"{tmp_path}/sums/other/test:1"
    with pytest.raises(UserError, match=r"sums/other/dev: cannot be loaded: .*dev"):
        dataset_source(str(tmp_path / "sums"), "other", "dev")


def test_a_folder_that_was_saved_to_disk(tmp_path):
    table = datasets.Dataset.from_list([{"prompt": "Q", "response": "A"}])
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"test": table}).save_to_disk(tmp_path / "splits")
    assert read(dataset_source(str(tmp_path / "one")))[0].messages == QA
    assert read(dataset_source(str(tmp_path / "splits"), split="test"))[0].messages == QA
    with pytest.raises(UserError, match=r"splits/train: cannot be loaded: "):
        dataset_source(str(tmp_path / "splits"))


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_by_other_names(tmp_path, streaming):
    write(tmp_path / "d" / "train.jsonl", {"messages": "no list", "frage": "Q", "antwort": "A"})
    found = read(dataset_source(str(tmp_path / "d"), columns={"prompt": "frage", "response": "antwort"}, streaming=streaming))
    assert found[0].messages == QA  # and `messages` is not looked at
    if not streaming:
        with pytest.raises(UserError, match=r"d/train: no column fragen; there are messages, frage, antwort$"):
            dataset_source(str(tmp_path / "d"), columns={"prompt": "fragen"})


def test_columns_of_a_file(tmp_path):
    (tmp_path / "a.csv").write_text("frage;antwort;messages\nQ;A;x\n")
    columns = {"prompt": "frage", "response": "antwort"}
    assert read(file_source(tmp_path / "a.csv", columns))[0].messages == QA
    skips = Skips()
    write(tmp_path / "b.jsonl", {"frage": "Q"}, {"prompt": "Q"}, "Q")
    assert [one.messages for one in read(file_source(tmp_path / "b.jsonl", columns), skips, on_bad="skip")] == [QA[:1]]
    assert skips.counts == {"none of the columns": 2}
    with pytest.raises(UserError, match=r"b.jsonl:2: none of the columns: frage, antwort are asked for$"):
        read(file_source(tmp_path / "b.jsonl", columns))


def test_case_50_files_that_do_not_go_together_name_the_dataset(tmp_path):
    write(tmp_path / "d" / "a.jsonl", {"prompt": "Q"})
    write(tmp_path / "d" / "b.jsonl", {"messages": list(QA), "extra": 1})
    with pytest.raises(UserError, match=r"^\S+/d/train: cannot be (loaded|read further): .+$"):
        read(dataset_source(str(tmp_path / "d")))


def test_what_is_not_there_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"^/no/such: no such folder$"):
        dataset_source("/no/such")
    with pytest.raises(UserError, match=r"^nobody/nothing/train: cannot be loaded: .+$"):
        dataset_source("nobody/nothing")  # offline in tests
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"needs the package datasets; install it with: pip install 'headstart\[data\]'$"):
        dataset_source("nobody/nothing")
