"""The embedded engine against transformers' own generate and forward."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen3 import Qwen3Config

from pa_core.errors import EngineError, StoreError
from pa_core.rollout.embedded import AppendLayer, EmbeddedEngine, choose_tokens, group_uniforms, keep_order
from pa_core.rollout.protocol import GenerateRequest, GenerateResponse, Generation, VersionMismatch

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "mistral, sliding window": MistralConfig(**SIZES, sliding_window=6),
}


def make_model(name: str = "llama") -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_model(request.param)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return make_model()


@pytest.fixture
def engine(llama: PreTrainedModel) -> Iterator[EmbeddedEngine]:
    engine = EmbeddedEngine(llama, [], lambda version: f"digest{version}", batch_groups=4)
    engine.load(0)
    yield engine
    engine.close()


def prompts(count: int = 4) -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    return [generator.integers(1, VOCABULARY, 3 + 4 * index).astype(np.int32) for index in range(count)]


def request(index: int, token_ids: np.ndarray, **changes: object) -> GenerateRequest:
    values = {"samples": 3, "temperature": 0.8, "max_tokens": 10, "seed": 7, "version": 0, **changes}
    return GenerateRequest(group_id=f"p{index}", token_ids=token_ids, **values)  # type: ignore[arg-type]


def ask(engine: EmbeddedEngine, requests: list[GenerateRequest]) -> list[GenerateResponse]:
    return [future.result(timeout=60) for future in [engine.submit(one) for one in requests]]


def tokens_of(responses: list[GenerateResponse]) -> list[list[list[int]]]:
    return [[generation.token_ids.tolist() for generation in response.generations] for response in responses]


def test_greedy_tokens_of_a_ragged_batch_equal_huggingface_generate(model: PreTrainedModel) -> None:
    engine = EmbeddedEngine(model, [], lambda version: "", batch_groups=4)
    engine.load(0)
    answers = ask(engine, [request(i, p, temperature=0.0, samples=2) for i, p in enumerate(prompts())])
    engine.close()
    for prompt, answer in zip(prompts(), answers, strict=True):
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        truth = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10)
        for generation in answer.generations:
            assert generation.token_ids.tolist() == truth[0, len(prompt) :].tolist()
            assert generation.finish_reason == "length"


def test_logprobs_equal_the_log_softmax_of_a_plain_forward_at_the_temperature(model: PreTrainedModel) -> None:
    stops = [3, 11, 17, 29, 31, 41]
    engine = EmbeddedEngine(model, stops, lambda version: "", batch_groups=4)
    engine.load(0)
    answers = ask(engine, [request(i, p, samples=6) for i, p in enumerate(prompts())])
    engine.close()
    lengths = set()
    for prompt, answer in zip(prompts(), answers, strict=True):
        for generation in answer.generations:
            row = torch.from_numpy(np.concatenate([prompt, generation.token_ids]).astype(np.int64))
            with torch.no_grad():
                logits = model(row[None]).logits[0, len(prompt) - 1 : -1]
            truth = torch.log_softmax(logits.double() / 0.8, -1).gather(1, row[len(prompt) :, None])[:, 0]
            np.testing.assert_allclose(generation.logprobs, truth.numpy(), atol=2e-5)
            assert generation.logprobs.dtype == np.float32
            lengths.add(len(row) - len(prompt))
    assert len(lengths) > 3, "rows should have left the batch at different times"


def test_tokens_depend_on_the_seed_and_not_on_the_company(llama: PreTrainedModel, engine: EmbeddedEngine) -> None:
    requests = [request(i, p, samples=4, max_tokens=6 + i) for i, p in enumerate(prompts())]
    together = tokens_of(ask(engine, requests))
    alone = [tokens_of(ask(engine, [one]))[0] for one in requests]
    reversed_order = tokens_of(ask(engine, requests[::-1]))[::-1]
    assert together == alone == reversed_order
    one_by_one = EmbeddedEngine(llama, [], lambda version: "", batch_groups=1)
    one_by_one.load(0)
    assert tokens_of(ask(one_by_one, requests)) == together
    one_by_one.close()


def test_seed_version_and_group_id_each_change_the_random_stream(engine: EmbeddedEngine) -> None:
    prompt = prompts()[0]
    base = request(0, prompt)
    streams = [base, request(0, prompt, seed=8), request(0, prompt, version=1), request(1, prompt)]
    draws = [group_uniforms(one).tolist() for one in streams]
    assert all(draws[a] != draws[b] for a in range(4) for b in range(a))
    assert tokens_of(ask(engine, [base])) == tokens_of(ask(engine, [base]))
    assert tokens_of(ask(engine, [base])) != tokens_of(ask(engine, [request(0, prompt, seed=8)]))


def test_samples_of_a_group_differ(engine: EmbeddedEngine) -> None:
    (answer,) = ask(engine, [request(0, prompts()[0], samples=16, temperature=1.0)])
    assert len({tuple(generation.token_ids) for generation in answer.generations}) > 8


def test_a_stop_token_is_kept_as_the_last_token(llama: PreTrainedModel, engine: EmbeddedEngine) -> None:
    whole = tokens_of(ask(engine, [request(0, prompts()[0], samples=8)]))[0]
    stop = whole[0][4]
    stopping = EmbeddedEngine(llama, [stop], lambda version: "")
    stopping.load(0)
    (answer,) = ask(stopping, [request(0, prompts()[0], samples=8)])
    stopping.close()
    for generation, full in zip(answer.generations, whole, strict=True):
        expected = full[: full.index(stop) + 1] if stop in full else full
        assert generation.token_ids.tolist() == expected
        assert generation.finish_reason == ("stop" if stop in full else "length")
        assert len(generation.logprobs) == len(expected)


def test_a_short_group_is_answered_while_a_long_one_goes_on(engine: EmbeddedEngine) -> None:
    order: list[str] = []
    long = engine.submit(request(0, prompts()[0], max_tokens=100))
    short = engine.submit(request(1, prompts()[1], max_tokens=1))
    long.add_done_callback(lambda _: order.append("long"))
    short.add_done_callback(lambda _: order.append("short"))
    answers = [long.result(timeout=60), short.result(timeout=60)]
    assert order == ["short", "long"]
    assert answers[0].started_at == answers[1].started_at, "both were decoded in one loop"
    assert answers[1].ended_at < answers[0].ended_at
    assert len(answers[0].generations[0].token_ids) == 100


def test_a_cancelled_group_is_dropped_and_others_are_served(engine: EmbeddedEngine) -> None:
    doomed = engine.submit(request(0, prompts()[0], max_tokens=100))
    other = engine.submit(request(1, prompts()[1], max_tokens=5))
    assert doomed.cancel()
    assert len(other.result(timeout=60).generations) == 3


def test_sampling_follows_the_softmax_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([[1.0, -1.0, 0.5, -torch.inf, 2.0]])
    draws = 20_000
    uniforms = torch.rand(draws, dtype=torch.float64)
    tokens, logprobs = choose_tokens(logits.expand(draws, -1), torch.full((draws,), 0.7), uniforms)
    truth = torch.softmax(logits[0].double() / 0.7, -1)
    shares = torch.bincount(tokens, minlength=5) / draws
    assert shares[3] == 0
    torch.testing.assert_close(shares.double(), truth, atol=0.015, rtol=0)
    torch.testing.assert_close(logprobs.double(), truth.log()[tokens], atol=1e-5, rtol=0)


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(1.0, 0.0)])
def test_a_token_of_probability_zero_is_never_drawn_at_the_edges(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]])
    tokens, _ = choose_tokens(logits, torch.ones(1), torch.tensor([uniform], dtype=torch.float64))
    assert tokens.item() in (1, 2)


def test_the_append_cache_equals_the_librarys_cache_under_row_removal() -> None:
    torch.manual_seed(0)
    ours, theirs = AppendLayer(), DynamicCache(config=CONFIGS["llama"]).layers[0]
    rows = 6
    for step in range(AppendLayer.HEADROOM + 10):
        new = torch.randn(2, rows, 2, 1, 8)
        for got, want in zip(ours.update(*new), theirs.update(*new), strict=True):
            assert torch.equal(got, want)
        if step in (0, 5, 40):
            kept = list(range(rows))
            del kept[1]
            index = torch.tensor(keep_order(kept))
            ours.batch_select_indices(index)
            theirs.batch_select_indices(index)
            rows -= 1
    repeat = torch.tensor([0, 0, 1, 2, 2])
    ours.batch_select_indices(repeat)
    theirs.batch_select_indices(repeat)
    assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


def test_another_version_is_refused_before_and_after_a_load(llama: PreTrainedModel) -> None:
    engine = EmbeddedEngine(llama, [], lambda version: f"digest{version}")
    with pytest.raises(VersionMismatch, match=r"version 0.*has loaded None"):
        engine.submit(request(0, prompts()[0]))
    assert engine.load(3) == "digest3"
    with pytest.raises(VersionMismatch, match=r"version 0.*has loaded 3"):
        engine.submit(request(0, prompts()[0]))
    engine.close()


def test_after_a_failed_load_nothing_is_generated(llama: PreTrainedModel) -> None:
    def load(version: int) -> str:
        if version == 1:
            raise StoreError("shard 0 of version 1 has a wrong digest")
        return ""

    engine = EmbeddedEngine(llama, [], load)
    engine.load(0)
    with pytest.raises(StoreError, match="wrong digest"):
        engine.load(1)
    for version in (0, 1):
        with pytest.raises(VersionMismatch):
            engine.submit(request(0, prompts()[0], version=version))
    engine.close()


def test_a_load_waits_for_the_groups_in_flight(llama: PreTrainedModel) -> None:
    finished: list[str] = []
    engine = EmbeddedEngine(llama, [], lambda version: finished.append("load") or "")
    engine.load(0)
    finished.clear()
    future = engine.submit(request(0, prompts()[0], max_tokens=60))
    future.add_done_callback(lambda _: finished.append("group"))
    thread = threading.Thread(target=engine.load, args=(1,))
    thread.start()
    thread.join(timeout=60)
    assert finished == ["group", "load"]
    assert engine.version == 1
    engine.close()


def test_a_request_beyond_the_context_names_the_setting(engine: EmbeddedEngine) -> None:
    with pytest.raises(EngineError, match=r"exceeds the model's context of 128; lower sampling\.max_tokens"):
        engine.submit(request(0, prompts()[0], max_tokens=126))


def test_a_failing_model_fails_its_groups_and_the_engine_goes_on(
    engine: EmbeddedEngine, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(EmbeddedEngine, "_prefill", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(EngineError, match="out of memory"):
            engine.submit(request(0, prompts()[0])).result(timeout=60)
    assert ask(engine, [request(0, prompts()[0])])[0].replica == "embedded"


def test_closing_fails_what_waits(llama: PreTrainedModel) -> None:
    engine = EmbeddedEngine(llama, [], lambda version: "", batch_groups=1)
    engine.load(0)
    futures = [engine.submit(request(i, prompts()[0], max_tokens=100)) for i in range(3)]
    time.sleep(0.02)
    engine.close()
    with pytest.raises(EngineError, match="shutting down"):
        futures[2].result(timeout=5)


def test_requests_and_answers_survive_json_exactly() -> None:
    wanted = request(0, prompts()[2])
    back = GenerateRequest.from_json(json.loads(json.dumps(wanted.to_json())))
    assert back.token_ids.dtype == np.int32
    assert back.to_json() == wanted.to_json()
    logprobs = -np.random.default_rng(0).random(50).astype(np.float32)
    answer = GenerateResponse(
        "p0", 4, [Generation(prompts()[2], logprobs, "stop", ((4, len(logprobs)),))], 1.25, 2.5, "r0"
    )
    again = GenerateResponse.from_json(json.loads(json.dumps(answer.to_json())))
    assert np.array_equal(again.generations[0].logprobs, logprobs)
    assert again.to_json() == answer.to_json()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, "samples=0 must be at least 1"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"token_ids": []}, "token_ids must be a non-empty list"),
        ({"token_ids": ["x"]}, "malformed"),
    ],
)
def test_an_impossible_request_is_refused_with_its_field(changes: dict[str, object], message: str) -> None:
    tree = {**request(0, prompts()[0]).to_json(), **changes}
    with pytest.raises(EngineError, match=message):
        GenerateRequest.from_json(tree)
