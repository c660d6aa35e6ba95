"""The transformers and scripted backends, and the one engine of a process."""

from __future__ import annotations

import json
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from batches import ref
from transformers import AutoModelForCausalLM, TopKLogitsWarper, TopPLogitsWarper

from rollout_core.algorithms.experience import Trajectory, build_batch, completion_forward
from rollout_core.algorithms.policy import Policy
from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.config import SamplingParams, ScriptedBackend, TransformersBackend, VLLMBackend
from rollout_core.data.samples import Completion
from rollout_core.inference import engines
from rollout_core.inference.backend import ModelRef, Request, ScriptedEngine
from rollout_core.inference.engines import EngineOf, close_engine, engine, sleep_engine
from rollout_core.inference.hf import TransformersEngine, _distribution, _draw
from rollout_core.models.pretrained import load_causal_lm
from tests.store.patience import LONG

PROMPTS = ["sort 3 1 2 =", "sort 9 9 0 4 4 1 =", "0", "hello world", "sort 5 5 5 ="]


def requests(tokenizer, params: SamplingParams, prompts=PROMPTS, first_seed=100) -> list[Request]:
    return [
        Request(f"r{number}", tokenizer(prompt)["input_ids"], params, first_seed + number, prompt)
        for number, prompt in enumerate(prompts)
    ]


def reference(model: ModelRef):
    return AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32).eval()


def logits_of(policy, request: Request, completion: Completion) -> torch.Tensor:
    """Logits that each token of the completion was drawn from, by one plain forward pass."""
    ids = torch.tensor([[*request.prompt_token_ids, *completion.token_ids]])
    with torch.no_grad():
        return policy(ids).logits[0, len(request.prompt_token_ids) - 1 : -1]


def with_end_tokens(source: Path, target: Path, ends: list[int] | None) -> ModelRef:
    """A copy of a model whose generation config names more tokens that end a completion."""
    shutil.copytree(source, target)
    path = target / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))
    return ref(target)


@pytest.fixture(scope="module")
def hf(tiny):
    return TransformersEngine(TransformersBackend(), tiny)


@pytest.fixture(autouse=True)
def no_engine_left():
    yield
    close_engine()


# transformers


def test_greedy_equals_plain_generate(hf, tiny, tokenizer):
    policy = reference(tiny)
    asked = requests(tokenizer, SamplingParams(temperature=0.0, max_tokens=24))
    for request, completion in zip(asked, hf.generate(asked), strict=True):
        prompt = torch.tensor([request.prompt_token_ids])
        expected = policy.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24)
        assert completion.token_ids == expected[0, prompt.shape[1] :].tolist()
        expected_logprobs = logits_of(policy, request, completion).log_softmax(-1)
        torch.testing.assert_close(
            torch.tensor(completion.logprobs),
            expected_logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0],
            atol=1e-5,
            rtol=0,
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_beyond_the_tokenizer_are_never_drawn(padded, tokenizer, temperature):
    """Log-probabilities are those of the distribution over the others, as the learner's policy has it."""
    policy, known = load_causal_lm(padded.folder), len(tokenizer)
    asked = requests(tokenizer, SamplingParams(temperature=temperature, max_tokens=24, logprobs=5))
    for request, completion in zip(
        asked, TransformersEngine(TransformersBackend(), padded).generate(asked), strict=True
    ):
        logits_TV = logits_of(reference(padded), request, completion)
        assert int(logits_TV.argmax(-1).min()) >= known > max(completion.token_ids)
        assert all(token < known for likely in completion.top_logprobs for token, _ in likely)
        ids = torch.tensor(completion.token_ids)
        expected = logits_TV[:, :known].log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)
        batch = build_batch(
            [Trajectory(request.prompt_token_ids, completion.token_ids, completion.logprobs, 1.0, False)]
        )
        learned = completion_forward(Policy(policy, known_ids=known), batch, temperature=1.0, device=policy.device)
        torch.testing.assert_close(learned.logprobs[0].detach(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_sampled_logprobs_are_those_of_the_distribution_drawn_from(hf, tiny, tokenizer, temperature):
    policy = reference(tiny)
    asked = requests(tokenizer, SamplingParams(temperature=temperature, max_tokens=24))
    for request, completion in zip(asked, hf.generate(asked), strict=True):
        expected = (logits_of(policy, request, completion) / temperature).log_softmax(-1)
        expected = expected.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("top_k", [1, 2, 7, 1000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.93, 1.0])
def test_top_k_and_top_p_agree_with_transformers_own(top_k, top_p):
    torch.manual_seed(0)
    params = SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p)
    for logits in torch.randn(20, 50) * 3:
        scores = TopKLogitsWarper(top_k)(None, logits[None] / 0.8)  # type: ignore[arg-type]
        if top_p < 1:
            scores = TopPLogitsWarper(top_p)(None, scores)  # type: ignore[arg-type]
        torch.testing.assert_close(_distribution(logits, params), scores[0].log_softmax(-1))


def test_top_p_never_masks_everything():
    distribution = _distribution(torch.tensor([0.0, 5.0, 1.0]), SamplingParams(top_p=1e-9))
    assert distribution.exp().tolist() == [0, 1, 0]


def test_greedy_logprobs_are_the_models_own_whatever_the_masks():
    logits = torch.tensor([0.0, 5.0, 1.0])
    masked = SamplingParams(temperature=0.0, top_k=1, top_p=0.1)
    torch.testing.assert_close(_distribution(logits, masked), logits.log_softmax(-1))


def test_tokens_are_drawn_as_often_as_their_probability_says():
    distribution = torch.log_softmax(torch.tensor([0.0, 1.0, 2.0, -torch.inf]), -1)
    generator = torch.Generator().manual_seed(5)
    drawn = torch.tensor([_draw(distribution, SamplingParams(), generator) for _ in range(4000)])
    counts = torch.bincount(drawn, minlength=4) / 4000
    torch.testing.assert_close(counts, distribution.exp(), atol=0.03, rtol=0)
    assert counts[3] == 0


def test_a_request_draws_the_same_tokens_alone_and_among_others(hf, tokenizer):
    asked = requests(tokenizer, SamplingParams(max_tokens=16))
    together = hf.generate(asked)
    assert hf.generate(asked[::-1]) == together[::-1]
    assert [hf.generate([request])[0] for request in asked] == together


def test_another_seed_draws_other_tokens(hf, tokenizer):
    params = SamplingParams(max_tokens=16)
    one, other = (requests(tokenizer, params, first_seed=seed) for seed in (1, 50))
    assert all(a.token_ids != b.token_ids for a, b in zip(hf.generate(one), hf.generate(other), strict=True))


def test_a_completion_ends_at_its_end_token_or_at_its_length(hf, tokenizer):
    asked = requests(tokenizer, SamplingParams(temperature=5.0, max_tokens=64), prompts=PROMPTS * 8)
    ends = {"stop": 0, "length": 0}
    for completion in hf.generate(asked):
        ends[completion.finish_reason] += 1
        if completion.finish_reason == "stop":
            assert completion.token_ids.index(tokenizer.eos_token_id) == len(completion.token_ids) - 1
        else:
            assert len(completion.token_ids) == 64 and tokenizer.eos_token_id not in completion.token_ids
        assert len(completion.logprobs) == len(completion.token_ids)
        assert "<|endoftext|>" not in completion.text
    assert min(ends.values()) >= 2, ends


def test_every_end_token_of_the_generation_config_ends_a_completion(hf, tiny_model, tokenizer, tmp_path):
    """Chat models name several: the end of a turn beside the end of a text."""
    [request] = requests(tokenizer, SamplingParams(temperature=0.0, max_tokens=24), prompts=["hello world"])
    [plain] = hf.generate([request])
    end = plain.token_ids[5]
    model = with_end_tokens(tiny_model, tmp_path / "model", [tokenizer.eos_token_id, end])
    [completion] = TransformersEngine(TransformersBackend(), model).generate([request])
    first = plain.token_ids.index(end)
    assert completion.token_ids == plain.token_ids[: first + 1] and completion.finish_reason == "stop"


def test_a_model_that_names_no_end_token_ends_at_its_tokenizers(tiny_model, tokenizer, tmp_path):
    model = with_end_tokens(tiny_model, tmp_path / "base", None)
    asked = requests(tokenizer, SamplingParams(temperature=0.0, max_tokens=12, min_tokens=12))
    found = TransformersEngine(TransformersBackend(), model).generate(asked)
    assert all(len(one.token_ids) == 12 and tokenizer.eos_token_id not in one.token_ids for one in found)


def test_a_stop_string_ends_the_completion_and_is_no_part_of_its_text(hf, tokenizer):
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    [plain] = hf.generate(requests(tokenizer, greedy, prompts=["hello world"]))
    stop = plain.text[6:9]
    stopping = greedy.model_copy(update={"stop": ("not there", stop)})
    [completion] = hf.generate(requests(tokenizer, stopping, prompts=["hello world"]))
    assert completion.finish_reason == "stop"
    assert completion.text == plain.text[: plain.text.index(stop)]
    count = len(completion.token_ids)
    assert count < 24 and completion.token_ids == plain.token_ids[:count], "tokens after the stop are not generated"
    assert stop in tokenizer.decode(completion.token_ids), "the tokens that made it are kept, for training"


def test_the_first_of_several_stop_strings_counts(hf, tokenizer):
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    [plain] = hf.generate(requests(tokenizer, greedy, prompts=["hello world"]))
    stops = (plain.text[8:10], plain.text[2:4])
    [completion] = hf.generate(requests(tokenizer, greedy.model_copy(update={"stop": stops}), prompts=["hello world"]))
    assert completion.text == plain.text[: min(plain.text.index(stop) for stop in stops)]


def test_new_weights_are_used_at_once(tiny, other_tiny, tokenizer):
    asked = requests(tokenizer, SamplingParams(temperature=0.0, max_tokens=8))
    swapped = TransformersEngine(TransformersBackend(), tiny)
    before = swapped.generate(asked)
    swapped.update_weights(other_tiny)
    assert swapped.model_id == other_tiny.content_id
    assert swapped.generate(asked) == TransformersEngine(TransformersBackend(), other_tiny).generate(asked) != before
    swapped.update_weights(tiny)
    assert swapped.generate(asked) == before


def test_the_context_is_the_models_own_unless_configured(hf, tiny):
    assert hf.max_model_len == 256
    assert TransformersEngine(TransformersBackend(max_model_len=32), tiny).max_model_len == 32


# scripted


def test_scripted_answers_are_its_text_with_the_prompt(tiny, tokenizer):
    scripted = ScriptedEngine(ScriptedBackend(text="<{prompt}>"), tiny)
    completions = scripted.generate(requests(tokenizer, SamplingParams(max_tokens=100)))
    assert [completion.text for completion in completions] == [f"<{prompt}>" for prompt in PROMPTS]
    for completion in completions:
        assert completion.token_ids[-1] == tokenizer.eos_token_id and completion.finish_reason == "stop"
        assert set(completion.logprobs) == {0.0} and len(completion.logprobs) == len(completion.token_ids)


def test_a_scripted_answer_is_cut_at_max_tokens(tiny, tokenizer):
    scripted = ScriptedEngine(ScriptedBackend(text="one two three"), tiny)
    whole = len(tokenizer("one two three")["input_ids"]) + 1
    for max_tokens in (1, 4, whole - 1, whole):
        [completion] = scripted.generate(requests(tokenizer, SamplingParams(max_tokens=max_tokens), prompts=["x"]))
        assert len(completion.token_ids) == max_tokens
        assert completion.finish_reason == ("stop" if max_tokens == whole else "length")
        assert "one two three".startswith(completion.text)


# One engine a process

SCRIPTED = ScriptedBackend()


@pytest.fixture
def built(monkeypatch) -> list[ModelRef]:
    """The models that backends were built for."""
    models: list[ModelRef] = []
    build = engines.build_backend

    def remember(config, model):
        models.append(model)
        return build(config, model)

    monkeypatch.setattr(engines, "build_backend", remember)
    return models


def test_the_engine_stays_and_only_its_weights_change(tiny, other_tiny, built):
    with engine(SCRIPTED, tiny) as first:
        assert first.model_id == tiny.content_id
    with engine(SCRIPTED, other_tiny) as second:
        assert second is first and second.model_id == other_tiny.content_id
    assert built == [tiny]


def test_another_configuration_is_another_engine(tiny, built):
    with engine(SCRIPTED, tiny):
        pass
    with engine(ScriptedBackend(text="other"), tiny):
        pass
    assert len(built) == 2


@pytest.mark.parametrize("change", ["architecture", "tokenizer", "end tokens"])
def test_a_model_that_needs_more_than_new_weights_is_another_engine(tiny, tiny_model, built, tmp_path, change):
    """A running engine keeps the tokenizer and the end tokens of the model it was built for."""
    folder = tmp_path / "model"
    if change == "end tokens":
        other = with_end_tokens(tiny_model, folder, [1, 2])
    else:
        shutil.copytree(tiny_model, folder)
        path = folder / ("config.json" if change == "architecture" else "tokenizer_config.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 5, "padding_side": "left"}))
        other = ref(folder)
    with engine(SCRIPTED, tiny):
        pass
    with engine(SCRIPTED, other):
        pass
    assert built == [tiny, other]


def test_a_trained_checkpoint_needs_no_other_engine(tiny, built, tmp_path):
    """What the trainer saves differs from its base model in weights alone."""
    from rollout_core.models.pretrained import copy_tokenizer, load_causal_lm

    policy = load_causal_lm(tiny.folder)
    with torch.no_grad():
        next(policy.parameters()).add_(0.01)
    policy.save_pretrained(tmp_path / "trained")
    copy_tokenizer(tiny.folder, tmp_path / "trained")
    trained = ref(tmp_path / "trained")
    assert trained.content_id != tiny.content_id
    for model in (tiny, trained):
        with engine(SCRIPTED, model):
            pass
    assert built == [tiny]


@pytest.mark.parametrize("config", [ScriptedBackend(), TransformersBackend(), VLLMBackend(dtype="float32")])
def test_a_base_in_bfloat16_and_a_checkpoint_in_float32_share_an_engine(config, tiny, built, monkeypatch, tmp_path):
    """Of vLLM here the decision alone; `test_vllm` has one read both."""
    from rollout_core.models.pretrained import copy_tokenizer, load_causal_lm

    load_causal_lm(tiny.folder, "bfloat16").save_pretrained(tmp_path / "base")
    copy_tokenizer(tiny.folder, tmp_path / "base")
    base = ref(tmp_path / "base")
    dtypes = [json.loads((model.folder / "config.json").read_text())["dtype"] for model in (base, tiny)]
    assert dtypes == ["bfloat16", "float32"]
    build = engines.build_backend
    monkeypatch.setattr(
        engines, "build_backend", lambda given, model: build(SCRIPTED if given.kind == "vllm" else given, model)
    )
    for model in (base, tiny):
        with engine(config, model) as found:
            pass
    assert built == [base] and found.model_id == tiny.content_id


def test_a_base_whose_configuration_has_fewer_keys_or_an_older_form_shares_its_checkpoints_engine(
    tiny, built, tmp_path
):
    shutil.copytree(tiny.folder, tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    config = json.loads(path.read_text())
    older = {key: config[key] for key in config if key not in ("attention_dropout", "initializer_range", "use_cache")}
    older |= {"torch_dtype": older.pop("dtype"), "rope_theta": older.pop("rope_parameters")["rope_theta"]}
    path.write_text(json.dumps({**older, "transformers_version": "4.46.0"}))
    base = ref(tmp_path / "base")
    assert base.content_id != tiny.content_id
    for model in (base, tiny):
        with engine(SCRIPTED, model):
            pass
    assert built == [base]


def test_an_engine_in_doubt_is_dropped(tiny, built):
    with pytest.raises(KeyboardInterrupt), engine(SCRIPTED, tiny):
        raise KeyboardInterrupt
    with engine(SCRIPTED, tiny):
        pass
    assert len(built) == 2


def test_an_engine_that_cannot_take_the_weights_is_dropped(tiny, other_tiny, built, monkeypatch):
    with engine(SCRIPTED, tiny):
        pass
    monkeypatch.setattr(ScriptedEngine, "update_weights", lambda self, model: 1 / 0)
    with pytest.raises(ZeroDivisionError), engine(SCRIPTED, other_tiny):
        pass
    monkeypatch.undo()
    with engine(SCRIPTED, other_tiny) as backend:
        assert backend.model_id == other_tiny.content_id


def test_callers_with_the_same_model_share_the_engine_and_others_wait(tiny, other_tiny):
    order: list[str] = []

    def enter(name: str, model: ModelRef) -> None:
        with engine(SCRIPTED, model):
            order.append(name)

    with engine(SCRIPTED, tiny):
        threads = [
            threading.Thread(target=enter, args=arguments) for arguments in (("other", other_tiny), ("same", tiny))
        ]
        for thread in threads:
            thread.start()
        threads[1].join(LONG)
        threads[0].join(0.1)
        order.append("first")
    threads[0].join(LONG)
    assert order == ["same", "first", "other"]


def test_without_vllm_the_error_names_what_to_install(tiny, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"install rollout-post-training\[vllm\]"), engine(VLLMBackend(), tiny):
        pass


def test_the_start_of_an_engine_is_told_and_its_reuse_is_not(tiny):
    said: list[str] = []
    for _ in range(2):
        with EngineOf(TransformersBackend(), tiny, said.append).open():
            pass
    assert said[0] == "starting the transformers engine ..."
    assert re.fullmatch(r"transformers engine ready in \d+ s", said[1]) and len(said) == 2


class Resting(ScriptedEngine):
    """Tells what it was asked."""

    fault: Exception | None = None

    def __init__(self, config, model):
        self.told: list[str] = []
        super().__init__(config, model)

    def update_weights(self, model):
        self.told.append("weights")
        super().update_weights(model)

    def sleep(self):
        self.told.append("sleep")
        if self.fault is not None:
            raise self.fault


def test_an_engine_rests_where_nobody_uses_it_and_is_woken_by_its_next_use(tiny, monkeypatch):
    monkeypatch.setattr(engines, "build_backend", Resting)
    sleep_engine()  # there is none
    with engine(SCRIPTED, tiny) as first:
        assert isinstance(first, Resting)
        sleep_engine()
    assert "sleep" not in first.told, "it was in use"
    sleep_engine()
    with engine(SCRIPTED, tiny) as again:
        assert again is first and first.told[-2:] == ["sleep", "weights"]
    first.fault = Recoverable("the engine died in its sleep")
    sleep_engine()
    with engine(SCRIPTED, tiny) as other:
        assert other is not first


def test_an_idle_engine_takes_the_next_weights_ahead(tiny, other_tiny, monkeypatch):
    monkeypatch.setattr(engines, "build_backend", Resting)
    engines.load_ahead(tiny).result()  # there is no engine, and none is started
    with engine(SCRIPTED, tiny) as first:
        assert isinstance(first, Resting)
        engines.load_ahead(other_tiny).result()
        assert first.model_id == tiny.content_id, "it was in use"
    engines.load_ahead(other_tiny).result()
    assert first.model_id == other_tiny.content_id

    begun, go_on, take = threading.Event(), threading.Event(), first.update_weights

    def slow(model):
        begun.set()
        assert go_on.wait(LONG)
        take(model)

    monkeypatch.setattr(first, "update_weights", slow)

    def use():
        with engine(SCRIPTED, tiny) as found:
            return found.model_id

    loading = engines.load_ahead(tiny)
    assert begun.wait(LONG)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(use)
        assert not waits.done(), "it is being prepared"
        go_on.set()
        assert waits.result(timeout=LONG) == tiny.content_id and loading.result() is None


@pytest.mark.parametrize("fault", ["it is another architecture", "the engine fails"])
def test_weights_that_cannot_be_taken_ahead_hinder_nobody(tiny, other_tiny, tmp_path, monkeypatch, fault):
    monkeypatch.setattr(engines, "build_backend", Resting)
    with engine(SCRIPTED, tiny) as first:
        assert isinstance(first, Resting)
    model = other_tiny
    if fault == "the engine fails":
        monkeypatch.setattr(first, "update_weights", lambda model: 1 / 0)
    else:
        shutil.copytree(tiny.folder, tmp_path / "other")
        config = tmp_path / "other" / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 0.5}))
        model = replace(other_tiny, folder=tmp_path / "other")
    engines.load_ahead(model).result()
    assert first.model_id == tiny.content_id
    with engine(SCRIPTED, other_tiny) as again:
        assert again.model_id == other_tiny.content_id
        assert (again is first) is (fault != "the engine fails")


def cut(request: Request, completion: Completion) -> Request:
    """The same request, which one of the tokens that were drawn ends."""
    return replace(request, ends=[completion.token_ids[len(completion.token_ids) // 2]])


def test_a_token_that_ends_a_turn_ends_a_completion_and_is_no_part_of_its_text(hf, tokenizer):
    params = SamplingParams(temperature=0.9, max_tokens=24)
    asked = requests(tokenizer, params)
    whole = hf.generate(asked)
    for request, completion in zip(asked, whole, strict=True):
        [got] = hf.generate([cut(request, completion)])
        place = list(completion.token_ids).index(cut(request, completion).ends[0])
        assert got.token_ids == list(completion.token_ids)[: place + 1] and got.finish_reason == "stop"
        assert completion.text.startswith(got.text)
        assert got.text == hf._text(request, completion.token_ids[:place])
        # Before min_tokens nothing ends it, and nothing where ends are ignored.
        ignoring = SamplingParams(temperature=0.9, max_tokens=24, ignore_eos=True)
        [going] = hf.generate([replace(cut(request, completion), params=ignoring)])
        assert going.finish_reason == "length"
