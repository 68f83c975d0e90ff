"""Stored features: what comes back, at what precision and size, and torn, evicted, unfinished and wrong ones."""

import multiprocessing
import random
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from headstart.data import store as store_module
from headstart.data import survey as survey_module
from headstart.data.chat import Sample
from headstart.data.encoding import decode, encode
from headstart.data.features import MemoryFeatures
from headstart.data.manifest import check_folder, claim_folder
from headstart.data.store import FeatureStore, check_room, shard_files
from headstart.data.stored import StoredFeatures
from headstart.data.survey import Layout, survey
from headstart.errors import UserError

LENGTHS = [7, 3, 12, 5, 9, 3, 20, 4]
LAYERS = (1, 3)


def texts(lengths=LENGTHS, seed=0):
    rng = random.Random(seed)
    rows = []
    for n, length in enumerate(lengths):
        answer = rng.randrange(1, length)
        rows.append(Sample([rng.randrange(96) for _ in range(length)], [i >= answer for i in range(length)], source=f"f:{n}"))
    return rows


def open_store(folder, verifier, samples, dtype="float32", layers=LAYERS, everywhere=True, keep=None):
    folder.mkdir(exist_ok=True)
    counted = survey(samples, Layout(layers, verifier.facts.hidden_size, dtype, everywhere))
    return StoredFeatures(verifier, samples, FeatureStore(folder, counted, keep), batch_tokens=24)


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


@pytest.fixture
def verifier(tiny):
    return tiny("llama")


@pytest.fixture
def small_shards(monkeypatch):
    """About three samples a shard."""
    monkeypatch.setattr(survey_module, "SHARD", 7000)


@pytest.fixture
def silenced(verifier, monkeypatch):
    """From now on the verifier's layers may not run."""

    def silence():
        def refuse(*_, **__):
            raise AssertionError("the verifier ran")

        monkeypatch.setattr(verifier.decoder, "forward", refuse)

    return silence


def same(got, expected):
    """But for what other padding beside a sample does to its last bits."""
    for name in ("last", "layers", "choice"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("layers", [LAYERS, ()], ids=["states", "no states"])
def test_case_41_stored_features_are_each_samples_own(layers, verifier, tmp_path, small_shards, silenced):
    """In float32 bit for bit what a pass of the verifier gave, in any order, and without another pass."""
    samples = texts()
    fresh = MemoryFeatures(verifier, samples, layers, 24)
    open_store(tmp_path, verifier, samples, layers=layers).fill()
    silenced()
    source = open_store(tmp_path, verifier, samples, layers=layers)
    source.fill()
    assert len(shards(tmp_path)) > 1
    for indices in ([0, 1, 2], [2, 0, 1], [7], [6, 3], [3, 6, 0, 5], [0, 1, 2]):
        batch, features = source.load(indices)
        known, expected = fresh.load(indices)
        assert (batch.ids.equal(known.ids), batch.mask.equal(known.mask)) == (True, True)
        for name in ("last", "layers"):
            torch.testing.assert_close(getattr(features, name), getattr(expected, name), atol=2e-5, rtol=1e-5)
        assert features.choice.equal(expected.choice)


def test_heads_learn_the_same_from_the_disk(verifier, tmp_path, silenced, tiny_eagle3, tiny_medusa, tiny_eagle1, tiny_mtp):
    """EAGLE-3 from a store that holds the last state only where its loss reads it; and no pass of the verifier's layers."""
    samples = texts()
    sources = {}
    for head in (tiny_eagle3(verifier), tiny_medusa(verifier, targets="soft"), tiny_eagle1(verifier), tiny_mtp(verifier)):
        layers = head.needs
        source = open_store(tmp_path / head.kind, verifier, samples, layers=layers, everywhere=not layers)
        source.fill()
        sources[head.kind] = (head, source, MemoryFeatures(verifier, samples, layers, 24))
    silenced()
    for head, source, fresh in sources.values():
        losses = [head.loss(*kept.load([2, 6, 4, 0]), verifier) for kept in (source, fresh)]
        assert int(losses[1].counts.sum()) > 0
        assert losses[0].counts.equal(losses[1].counts)
        torch.testing.assert_close(losses[0].sums, losses[1].sums, atol=1e-4, rtol=1e-5)


def test_only_what_the_loss_reads_of_the_last_state_lies_on_disk(verifier, tmp_path):
    samples = texts()
    open_store(tmp_path, verifier, samples, everywhere=False).fill()
    (path,) = shards(tmp_path)
    tensors = load_file(path)
    assert tensors["last"].shape == (sum(sum(sample.mask[1:]) for sample in samples), 32)
    assert tensors["layers"].shape == (sum(LENGTHS), 2, 32)


def test_one_byte_a_value_with_a_scale_for_each_row():
    states = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.01, 1.0, 300.0])[:, None]
    states[7, 1] = 0.0
    for dtype, largest in (("int8", 127.0), ("float8", 448.0)):
        values, scale = encode(states, dtype)
        assert values.element_size() == 1
        peak = states.abs().amax(-1)
        torch.testing.assert_close(scale[peak > 0], peak[peak > 0] / largest)
        back = decode(values, scale, torch.float32)
        assert back[7, 1].equal(torch.zeros(64))
        if dtype == "int8":  # evenly spaced: half a step
            assert ((back - states).abs() <= scale[..., None] * 0.5001).all()
        else:  # three bits of mantissa: half of 1/8 of the value; below 2^-6 of the scale, evenly spaced by 2^-9
            bound = torch.maximum(states.abs() / 16, scale[..., None] * 2.0**-10) * 1.0001
            assert ((back - states).abs() <= bound).all()
            assert (back - states).abs().max() > 0
    assert encode(states, "bfloat16")[0].equal(states.bfloat16())
    assert encode(states, "float32")[1] is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float8", "int8", "float32"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_case_38_the_estimate_is_what_lands(dtype, everywhere, verifier, tmp_path, small_shards):
    """Within five per cent, where a shard is large enough to be one: headers of tiny ones are most of them."""
    samples = texts([60] * 40)
    survey_module.SHARD = 100_000
    source = open_store(tmp_path, verifier, samples, dtype, everywhere=everywhere)
    source.fill()
    landed = sum(path.stat().st_size for path in shards(tmp_path))
    assert source.store.survey.total_bytes() == pytest.approx(landed, rel=0.05)
    by_hand = 0
    width = {"bfloat16": 64, "float8": 36, "int8": 36, "float32": 128}[dtype]
    for sample in samples:
        last = 60 if everywhere else sum(sample.mask[1:])
        by_hand += 60 * 2 * width + last * width + 60 * 4 + 16
    assert source.store.survey.sample_bytes().sum() == by_hand


def test_case_40_a_torn_shard_is_written_again(verifier, tmp_path, small_shards, capsys):
    samples = texts()
    source = open_store(tmp_path, verifier, samples)
    source.fill()
    expected = source.load(range(8))[1]
    first, second, *_ = shards(tmp_path)
    whole, left = first.read_bytes(), second.read_bytes()
    first.write_bytes(whole[: len(whole) // 2])
    flipped = bytearray(left)
    flipped[-40] ^= 1
    second.unlink()
    second.write_bytes(flipped)
    told = []
    again = open_store(tmp_path, verifier, samples)
    again.fill(told.append)
    assert "torn" in capsys.readouterr().err
    assert 0 < sum(told) < sum(LENGTHS)  # of the first shard alone: the second is found out when it is read
    same(again.load(range(8))[1], expected)
    assert "does not match its checksum" in capsys.readouterr().err
    assert first.read_bytes() == whole
    same(open_store(tmp_path, verifier, samples).load(range(8))[1], expected)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_case_40_states_that_are_not_finite_are_refused_by_number(bad, verifier, tmp_path, monkeypatch):
    samples = texts()
    features = verifier.features

    def poisoned(ids, layers=(), positions=None):
        found = features(ids, layers, positions)
        for row in range(len(ids)):
            if ids[row, :12].tolist() == samples[2].ids:
                found.layers[row, 5, 40] = bad
        return found

    monkeypatch.setattr(verifier, "features", poisoned)
    with pytest.raises(UserError, match=r"sample 2 \(f:2\): the verifier's states are not finite"):
        open_store(tmp_path, verifier, samples).fill()
    assert shards(tmp_path) == []


def test_case_39_a_sample_that_changed_is_found_out_even_behind_the_manifest(verifier, tmp_path):
    """The checksum takes in ids and mask: nothing is ever served for other tokens."""
    samples = texts()
    open_store(tmp_path, verifier, samples).fill()
    changed = list(samples)
    changed[3] = Sample([*samples[3].ids[:-1], (samples[3].ids[-1] + 1) % 96], samples[3].mask)
    source = open_store(tmp_path, verifier, changed)
    source.fill()
    fresh = MemoryFeatures(verifier, changed, LAYERS, 24)
    torch.testing.assert_close(source.load([3])[1].last, fresh.load([3])[1].last, atol=2e-5, rtol=1e-5)


def test_a_budget_deletes_the_oldest_and_makes_them_again(verifier, tmp_path, small_shards):
    samples = texts([10] * 12)
    everything = MemoryFeatures(verifier, samples, LAYERS, 24)
    budget = 18_000  # four samples take about as much
    source = open_store(tmp_path, verifier, samples, keep=budget)
    computed = []
    make = source.make
    source.make = lambda indices, *rest: computed.append(list(indices)) or make(indices, *rest)
    for indices in ([0, 1], [2, 3], [0, 1], [4, 5], [6, 7], [8, 9], [0, 1], [8, 9]):
        _, features = source.load(indices)
        expected = everything.load(indices)[1]
        torch.testing.assert_close(features.layers, expected.layers, atol=2e-5, rtol=1e-5)
        time.sleep(0.01)  # ages differ
        assert 0 < sum(stat.st_size for _, stat in shard_files(tmp_path)) <= budget
    assert [c for c in computed if c] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [0, 1]]
    assert len(source.store.shards) == len(shards(tmp_path))  # nothing is remembered of the deleted ones


def test_a_budget_is_filled_and_no_more(verifier, tmp_path, small_shards):
    samples = texts([10] * 12)
    told = []
    open_store(tmp_path, verifier, samples, keep=16_000).fill(told.append)
    assert 0 < sum(told) < 120
    assert 0 < sum(stat.st_size for _, stat in shard_files(tmp_path)) <= 16_000
    again = []
    open_store(tmp_path, verifier, samples, keep=16_000).fill(again.append)
    assert again == []


def test_what_others_wrote_and_deleted_is_noticed(verifier, tmp_path, small_shards, silenced):
    samples = texts()
    mine, theirs = open_store(tmp_path, verifier, samples), open_store(tmp_path, verifier, samples)
    theirs.fill()
    expected = theirs.load(range(8))[1]
    same(mine.load(range(8))[1], expected)
    shards(tmp_path)[0].unlink()
    same(mine.load(range(8))[1], expected)  # made again
    silenced()
    same(theirs.load(range(8))[1], expected)


def fill(folder, verifier, samples, computed, pause):
    """In a process of its own: say each batch, and take a while for it."""
    source = open_store(folder, verifier, samples)
    source.fill(lambda count: (computed.put(count), time.sleep(pause)))


@pytest.fixture
def start(verifier, small_shards):
    """`start(folder, samples, pause)`: a process that fills a store, and the queue of the tokens it has computed."""
    forking = multiprocessing.get_context("fork")

    def begin(folder, samples, pause):
        computed = forking.SimpleQueue()
        process = forking.Process(target=fill, args=(folder, verifier, samples, computed, pause))
        process.start()
        return process, computed

    return begin


def heard(queue):
    tokens = 0
    while not queue.empty():
        tokens += queue.get()
    return tokens


def test_case_40_a_killed_writer_goes_on_where_it_was(start, verifier, tmp_path):
    """SIGKILL before a shard is whole: those that are stay, leftovers go, and only the rest is computed."""
    folder, samples = tmp_path / "store", texts([10] * 30)
    folder.mkdir()
    process, _ = start(folder, samples, 0.02)
    deadline = time.monotonic() + 60
    while len(shards(folder)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (folder / ".writing-dead").mkdir(exist_ok=True)  # as a kill in the middle of a shard leaves it
    (folder / ".writing-dead" / "00000000-0.safetensors").write_bytes(b"half")
    survived = {path: path.read_bytes() for path in shards(folder)}
    source = open_store(folder, verifier, samples)
    there = 30 - len(source.store.missing(range(30)))
    told = []
    source.fill(told.append)
    assert 3 <= there < 30
    assert sum(told) == 10 * (30 - there)
    assert {path: path.read_bytes() for path in survived} == survived
    assert not list(folder.glob(".writing-*"))
    fresh = MemoryFeatures(verifier, samples, LAYERS, 24)
    torch.testing.assert_close(source.load(range(30))[1].layers, fresh.load(range(30))[1].layers, atol=2e-5, rtol=1e-5)


def test_several_writers_share_the_work(start, verifier, tmp_path):
    """Two processes fill one folder: every sample is computed once, and all are there."""
    samples = texts([10] * 30)
    both = [start(tmp_path, samples, 0.02) for _ in range(2)]
    for process, _ in both:
        process.join(120)
    assert [process.exitcode for process, _ in both] == [0, 0]
    computed = [heard(queue) for _, queue in both]
    assert sum(computed) == 300
    assert min(computed) > 0
    source = open_store(tmp_path, verifier, samples)
    assert source.store.missing(range(30)) == []
    assert not list(tmp_path.glob(".*"))
    fresh = MemoryFeatures(verifier, samples, LAYERS, 24)
    torch.testing.assert_close(source.load(range(30))[1].layers, fresh.load(range(30))[1].layers, atol=2e-5, rtol=1e-5)


def test_a_folder_is_claimed_by_what_its_states_depend_on(tmp_path):
    key = {"verifier": "aa", "dtype": "int8", "layers": [1, 2]}
    claim_folder(tmp_path / "new", key, {"model": "m"})
    claim_folder(tmp_path / "new", key, {"model": "moved"})
    with pytest.raises(UserError, match=r"dtype: int8 there, float8 here; layers: \[1, 2\] there, \[1, 3\] here"):
        check_folder(tmp_path / "new", key | {"dtype": "float8", "layers": [1, 3]})
    with pytest.raises(UserError, match="prenorm: None there, False here"):
        check_folder(tmp_path / "new", key | {"prenorm": False})
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "00000000-0.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"is not empty and has no manifest\.json"):
        claim_folder(tmp_path / "old", key, {})
    for odd in ("", "{}", "[]", '{"key": 3}', '{"key": [1]}'):
        (tmp_path / "old" / "manifest.json").write_text(odd)
        with pytest.raises(UserError, match="is no manifest"):
            check_folder(tmp_path / "old", key)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        claim_folder(tmp_path / "file" / "below", key, {})


def test_what_does_not_fit_the_disk_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=5 * 10**9))
    (tmp_path / "00000000-0.safetensors").write_bytes(b"x" * 1000)
    check_room(tmp_path, 5 * 10**9 + 1000)
    with pytest.raises(UserError, match=r"needs 6\.00 GB more and the disk has 5\.00 GB free"):
        check_room(tmp_path / "deeper" / "still", 6 * 10**9)
    check_room(tmp_path, 10**12, keep=10**9)
    with pytest.raises(UserError, match=r"needs 7\.00 GB more"):
        check_room(tmp_path / "new", 10**12, keep=7 * 10**9)


def test_a_full_disk_keeps_what_is_complete(verifier, tmp_path, small_shards, monkeypatch):
    samples = texts()
    save, saved = store_module.write_shard, []

    def full(path, *rest):
        if len(saved) == 2:
            raise OSError(28, "No space left on device")
        saved.append(path)
        save(path, *rest)

    monkeypatch.setattr(store_module, "write_shard", full)
    with pytest.raises(UserError, match="No space left on device; what is complete stays, so make room and run again"):
        open_store(tmp_path, verifier, samples).fill()
    assert len(shards(tmp_path)) == 2
    assert not list(tmp_path.glob(".writing-*"))
    monkeypatch.setattr(store_module, "write_shard", save)
    told = []
    open_store(tmp_path, verifier, samples).fill(told.append)
    assert 0 < sum(told) < sum(LENGTHS)
