"""From rows to prompts: distinct questions, the held-out split, the chat template, the length check."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jinja2
import numpy as np
from numpy.typing import NDArray

from pa_core.config import DataConfig
from pa_core.data.sources import Row, read_rows, source_name
from pa_core.errors import DataError
from pa_core.records import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PromptSet:
    """The distinct problems of a source, split once and for all.

    Attributes:
        train: problems to train on, in the order of the source.
        held_out: problems never trained on, ordered by the hash of their text, so that the first n of them are the
            same for every seed. Ids are ``e00000000``, ``e00000001``, …
        fingerprint: sha256 over question and answer of all distinct rows in source order.
        source: the source in the words of the configuration.
        rows: rows read.
        duplicates: rows left out because an earlier row asks the same.
    """

    train: list[Prompt]
    held_out: list[Prompt]
    fingerprint: str
    source: str
    rows: int
    duplicates: int


def question_key(question: str) -> str:
    """Identity of a question: sha256 of its text, whatever its white space."""
    return hashlib.sha256(" ".join(question.split()).encode()).hexdigest()


def fingerprint(pairs: Iterable[tuple[str, str]]) -> str:
    """sha256 over (question, answer) pairs, in order."""
    digest = hashlib.sha256()
    for pair in pairs:
        digest.update(json.dumps(pair).encode() + b"\n")
    return digest.hexdigest()


def is_held_out(question: str, share: float) -> bool:
    """Whether a question belongs to the held-out part.

    Decided by the hash of its text alone: neither seed nor row order nor the other rows can move it across.
    """
    return int(question_key(question)[:16], 16) < share * 2**64


def without(prompts: Sequence[Prompt], others: Sequence[Prompt]) -> list[Prompt]:
    """``prompts`` less those that ask what one of ``others`` asks: keeps a separate evaluation set out of training."""
    asked = {question_key(prompt.text) for prompt in others}
    return [prompt for prompt in prompts if question_key(prompt.text) not in asked]


def load_prompts(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, context_limit: int, max_tokens: int
) -> PromptSet:
    """Read, split and tokenise a data set.

    A question that occurs in several rows counts once, with the answer of its first row.

    Args:
        seed: seeds a reasoning-gym task without a seed of its own; it does not touch the split.
        context_limit: tokens the model can attend to; prompt and response must fit.
        max_tokens: tokens a response may have.

    Raises:
        DataError: the source cannot be read, lacks a column or rows, a prompt does not fit, or the split leaves a
            part empty.
    """
    rows = read_rows(config, seed)
    distinct: dict[str, Row] = {}
    for row in rows:
        distinct.setdefault(question_key(row.question), row)
    kept = list(distinct.values())
    token_ids = tokenize(config, tokenizer, [row.question for row in kept])
    _check_lengths(config, kept, token_ids, context_limit, max_tokens)

    train: list[tuple[Row, NDArray[np.int32]]] = []
    held_out: list[tuple[Row, NDArray[np.int32]]] = []
    for row, ids in zip(kept, token_ids, strict=True):
        (held_out if is_held_out(row.question, config.held_out) else train).append((row, ids))
    held_out.sort(key=lambda item: question_key(item[0].question))
    for part, name in ((train, "to train on"), (held_out, "to evaluate on")):
        if not part and (part is train or config.held_out > 0):
            raise DataError(
                f"data.held_out={config.held_out:g} of the {len(kept)} distinct problems of {source_name(config)} "
                f"leaves none {name}; change data.held_out or use more data"
            )
    return PromptSet(
        train=[_prompt("p", index, row, ids) for index, (row, ids) in enumerate(train)],
        held_out=[_prompt("e", index, row, ids) for index, (row, ids) in enumerate(held_out)],
        fingerprint=fingerprint((row.question, row.answer) for row in kept),
        source=source_name(config),
        rows=len(rows),
        duplicates=len(rows) - len(kept),
    )


def _prompt(prefix: str, index: int, row: Row, token_ids: NDArray[np.int32]) -> Prompt:
    return Prompt(f"{prefix}{index:08d}", index, row.question, token_ids, row.answer, row.metadata)


def tokenize(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, questions: Sequence[str]
) -> list[NDArray[np.int32]]:
    """Token ids, i32[Lp], of each question in its chat template, up to where the response begins.

    ``data.system_prompt: null`` sends no system message, and some templates then put their own default in its
    place; ``""`` sends an empty one, which leaves the default out. A tokenizer without a chat template gets the system
    prompt and the question as plain text, a blank line between them.

    Raises:
        DataError: when the chat template refuses the messages (some know no system message).
    """
    users = [config.prompt_template.replace("{prompt}", question) for question in questions]
    system = config.system_prompt
    if not tokenizer.chat_template:
        texts = [f"{system}\n\n{user}" if system else user for user in users]
        encoded = tokenizer(texts)
    else:
        head = [] if system is None else [{"role": "system", "content": system}]
        chats = [[*head, {"role": "user", "content": user}] for user in users]
        try:
            texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        except jinja2.TemplateError as error:
            raise DataError(
                f"the model's chat template refuses the prompts: {error}; if it knows no system message, leave "
                f"data.system_prompt={system!r} unset and write it into data.prompt_template"
            ) from error
        # The template writes the special tokens itself; adding them again would double the first one.
        encoded = tokenizer(texts, add_special_tokens=False)
    return [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]


def _check_lengths(
    config: DataConfig,
    rows: Sequence[Row],
    token_ids: Sequence[NDArray[np.int32]],
    context_limit: int,
    max_tokens: int,
) -> None:
    room = context_limit - max_tokens
    wrong = [(len(ids), row.number) for row, ids in zip(rows, token_ids, strict=True) if not 0 < len(ids) <= room]
    if not wrong:
        return
    length, number = max(wrong)
    if length == 0:
        raise DataError(f"row {number} of {source_name(config)}: the prompt has no tokens; check data.prompt_template")
    raise DataError(
        f"row {number} of {source_name(config)}: its prompt has {length} tokens, but the context of {context_limit} "
        f"(the model's, or engine.vllm.max_model_len where that is less) less sampling.max_tokens={max_tokens} leaves "
        f"{room} ({len(wrong)} of {len(rows)} prompts are too long); lower sampling.max_tokens, shorten "
        "data.prompt_template or remove the long rows"
    )
