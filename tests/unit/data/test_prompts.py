"""Prompts: chat template, held-out split, length check and fingerprint."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pa_core.config import DataConfig
from pa_core.data.prompts import PromptSet, is_held_out, load_prompts, without
from pa_core.errors import DataError

TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<s> system default </s> {% endif %}"
    "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant{% endif %}"
)
NO_SYSTEM_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ m['content'] }} {% endfor %}"
)


def tiny_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    words = ["<unk>", "<s>", "</s>", "system", "user", "assistant", "default", "+", "=", "?", "Answer", "briefly"]
    vocabulary = {word: index for index, word in enumerate([*words, *map(str, range(100))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    return fast


def sums(count: int) -> list[dict[str, Any]]:
    return [{"question": f"{i // 10} + {i % 10} = ?", "answer": i // 10 + i % 10} for i in range(count)]


def load(
    folder: Path, rows: list[dict[str, Any]], *, seed: int = 0, template: str | None = TEMPLATE, **fields: Any
) -> PromptSet:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    context, max_tokens = fields.pop("context_limit", 64), fields.pop("max_tokens", 8)
    return load_prompts(DataConfig(path=str(path), **fields), tiny_tokenizer(template), seed, context, max_tokens)


def rendered(prompts: PromptSet) -> str:
    return str(tiny_tokenizer(TEMPLATE).decode(prompts.train[0].token_ids))


def test_the_chat_template_is_applied_up_to_where_the_response_begins(tmp_path: Path) -> None:
    prompts = load(tmp_path, sums(1), system_prompt="Answer briefly", prompt_template="Answer {prompt}")
    assert rendered(prompts) == "<s> system Answer briefly </s> <s> user Answer 0 + 0 = ? </s> <s> assistant"
    prompt = prompts.train[0]
    assert prompt.token_ids.dtype == np.int32
    assert (prompt.id, prompt.index, prompt.text, prompt.answer) == ("p00000000", 0, "0 + 0 = ?", "0")


def test_no_system_prompt_leaves_the_templates_own_and_an_empty_one_removes_it(tmp_path: Path) -> None:
    assert rendered(load(tmp_path, sums(1))).startswith("<s> system default </s>")
    assert rendered(load(tmp_path, sums(1), system_prompt="")).startswith("<s> system </s>")


def test_a_tokenizer_without_chat_template_gets_the_plain_text(tmp_path: Path) -> None:
    assert rendered(load(tmp_path, sums(1), template=None)) == "0 + 0 = ?"
    with_system = load(tmp_path, sums(1), template=None, system_prompt="Answer briefly")
    assert rendered(with_system) == "Answer briefly 0 + 0 = ?"


def test_braces_of_latex_in_the_template_stay_as_they_are(tmp_path: Path) -> None:
    prompts = load(tmp_path, sums(1), prompt_template="{prompt} \\boxed{} {x}", template=None)
    assert len(prompts.train[0].token_ids) == 7


def test_a_template_that_knows_no_system_message_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"System role not supported.*data.system_prompt"):
        load(tmp_path, sums(1), template=NO_SYSTEM_TEMPLATE, system_prompt="Answer briefly")


def test_a_question_asked_twice_counts_once(tmp_path: Path) -> None:
    prompts = load(tmp_path, [*sums(3), {"question": "0 +  0 = ?\n", "answer": 99}])
    assert [prompt.answer for prompt in prompts.train] == ["0", "1", "2"]
    assert (prompts.rows, prompts.duplicates) == (4, 1)


def test_held_out_and_training_never_share_a_question_whatever_seed_and_row_order(tmp_path: Path) -> None:
    rows = sums(100)
    shuffled = rows * 3
    random.Random(1).shuffle(shuffled)
    first = load(tmp_path, rows, held_out=0.25, seed=0)
    second = load(tmp_path, shuffled, held_out=0.25, seed=7)
    for prompts in (first, second):
        train, held_out = ({prompt.text for prompt in part} for part in (prompts.train, prompts.held_out))
        assert train.isdisjoint(held_out)
        assert train | held_out == {row["question"] for row in rows}
    assert [(p.id, p.text) for p in first.held_out] == [(p.id, p.text) for p in second.held_out]
    assert first.held_out[0].id == "e00000000"
    assert 15 <= len(first.held_out) <= 35


def test_more_rows_never_move_a_question_across_the_split(tmp_path: Path) -> None:
    small = {prompt.text for prompt in load(tmp_path, sums(40), held_out=0.3).held_out}
    large = {prompt.text for prompt in load(tmp_path, sums(100), held_out=0.3).held_out}
    assert small == large & {row["question"] for row in sums(40)}


def test_seeds_of_a_generated_task_agree_on_what_is_held_out() -> None:
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 300}
    config = DataConfig(name="chain_sum", options=options, held_out=0.25)
    sets = [load_prompts(config, tiny_tokenizer(TEMPLATE), seed, 256, 8) for seed in (0, 1)]
    for one, other in (sets, sets[::-1]):
        assert {p.text for p in one.train}.isdisjoint({p.text for p in other.held_out})


def test_a_separate_evaluation_set_can_be_kept_out_of_training(tmp_path: Path) -> None:
    train = load(tmp_path, sums(10)).train
    evaluation = load(tmp_path, [{"question": " 0 + 3 =  ?", "answer": 3}, {"question": "5 + 5 = ?", "answer": 10}])
    assert [prompt.text for prompt in without(train, evaluation.train)] == [
        row["question"] for row in sums(10) if row["question"] != "0 + 3 = ?"
    ]


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_the_held_out_share_is_met_on_average(share: float) -> None:
    hits = sum(is_held_out(f"question {index}", share) for index in range(4000))
    assert abs(hits / 4000 - share) < 0.03


def test_a_split_that_leaves_a_part_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.held_out=0.001 of the 3 distinct problems .* none to evaluate on"):
        load(tmp_path, sums(3), held_out=0.001)
    with pytest.raises(DataError, match="none to train on"):
        load(tmp_path, sums(3), held_out=0.999)


def test_a_prompt_longer_than_the_context_names_row_length_limit_and_fix(tmp_path: Path) -> None:
    rows = [*sums(2), {"question": "1 " * 60, "answer": 1}]
    with pytest.raises(DataError) as caught:
        load(tmp_path, rows, template=None, context_limit=64, max_tokens=8)
    message = str(caught.value)
    for part in ("row 3", "60 tokens", "context of 64", "sampling.max_tokens=8 leaves 56", "1 of 3", "lower sampling."):
        assert part in message
    assert load(tmp_path, rows, template=None, context_limit=68, max_tokens=8).rows == 3


def test_the_fingerprint_changes_with_any_question_or_answer_and_with_nothing_else(tmp_path: Path) -> None:
    base = load(tmp_path, sums(5)).fingerprint
    assert load(tmp_path, sums(5), system_prompt="Answer", seed=3, held_out=0.3).fingerprint == base
    assert load(tmp_path, [*sums(4), {"question": "0 + 4 = ?", "answer": 5}]).fingerprint != base
    assert load(tmp_path, sums(4)).fingerprint != base


def test_the_answer_is_not_among_the_prompt_tokens(tmp_path: Path) -> None:
    prompts = load(tmp_path, [{"question": "40 + 2 = ?", "answer": 42}])
    assert "42" not in rendered(prompts).split()
