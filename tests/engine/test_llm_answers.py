"""What LLM and SamplingParams say to calls written for another engine: vectors, scores, and names that are not there."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served_model import write_model

import ridgeline
from ridgeline import LLM, SamplingParams
from ridgeline.errors import BadRequest, EngineDead, Unsupported
from ridgeline.known_options.python_names import CLASSES
from ridgeline.sampling_params import ONLY_THE_LIKELIEST, StructuredOutputs


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model: Path = write_model(tmp_path_factory.mktemp("model") / "tiny")
    made = LLM(model, load_format="dummy", num_gpu_blocks_override=64, max_num_seqs=4, use_tqdm_on_load=False)
    yield made
    made.close()


def test_close_frees_the_engine_and_later_calls_say_so(tmp_path: Path) -> None:
    with LLM(write_model(tmp_path / "tiny"), load_format="dummy", num_gpu_blocks_override=64, use_tqdm_on_load=False) as made:
        engine = weakref.ref(made.core)
        made.generate("Hello", SamplingParams(max_tokens=2), use_tqdm=False)
    assert engine() is None
    for call in (lambda: made.generate("Hello", use_tqdm=False), made.reset_prefix_cache):
        with pytest.raises(EngineDead, match="this LLM was closed; make a new one"):
            call()
    made.close()                                         # a second time does nothing


def test_embed(llm: LLM) -> None:
    one, two = llm.embed(["Hello", "What a day"], use_tqdm=False)
    assert one.outputs.hidden_size == 32 and one.finished and one.prompt_token_ids == list(llm.get_tokenizer().encode("Hello"))
    assert np.linalg.norm(one.outputs.embedding) == pytest.approx(1.0) and one.outputs.embedding != two.outputs.embedding
    raw, = llm.embed("Hello", normalize=False, use_tqdm=False)
    assert np.linalg.norm(raw.outputs.embedding) != pytest.approx(1.0)
    mean, = llm.embed("Hello", pooling="mean", use_tqdm=False)
    assert mean.outputs.embedding != one.outputs.embedding


def test_score(llm: LLM) -> None:
    """The sum of the second text's log-probabilities, as prompt_logprobs has them."""
    tokens = llm.get_tokenizer().encode("Hello there")
    begin = len(llm.get_tokenizer().encode("Hello"))
    output, = llm.generate("Hello there", SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    wanted = sum(at[token].logprob for token, at in list(zip(tokens, output.prompt_logprobs, strict=True))[begin:])
    first, second = llm.score("Hello", [" there", " you"], use_tqdm=False)
    assert first.outputs.score == pytest.approx(wanted) and first.outputs.num_tokens == len(tokens) - begin
    assert second.outputs.score != first.outputs.score
    for one, other in ((["a", "b"], ["c"]), ([], ["c"])):
        with pytest.raises(BadRequest, match="equally many texts"):
            llm.score(one, other)
    with pytest.raises(BadRequest, match="at least one token"):
        llm.score("Hello", "")


@pytest.mark.parametrize(
    ("name", "says"),
    [("encode", "use embed for vectors"), ("beam_search", "ask for n answers"), ("frobnicate", "no attribute 'frobnicate'")]
)
def test_methods_of_vllm_that_are_not_here(llm: LLM, name: str, says: str) -> None:
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=says):
        getattr(llm, name)


@pytest.mark.parametrize("role", ["usr", None, 3])
def test_a_misspelt_role_is_named(llm: LLM, role: Any) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": role, "content": "Hello"}]
    with pytest.raises(BadRequest, match=r"messages\[1\]\.role must be one of system, developer, user"):
        llm.chat([messages], use_tqdm=False)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_token": 5}, "SamplingParams has no field 'max_token'; did you mean 'max_tokens'?"),
        ({"frobnicate": 5}, "SamplingParams has no field 'frobnicate'"),
        ({"best_of": 2}, "best_of is not a field of SamplingParams: ask for n answers"),
        ({"use_beam_search": True}, "there is no beam search"),
        ({"max_new_tokens": 5}, "use max_tokens"),
        ({"guided_decoding": object()}, "guided_decoding is not supported; use structured_outputs"),
        ({"logits_processors": [print]}, "use logit_bias"),
        ({"flat_logprobs": True}, "log-probabilities are a list of mappings"),
        ({"thinking_token_budget": 100}, "use max_tokens"),
    ],
)
def test_fields_that_are_not_there(given: dict[str, Any], says: str) -> None:
    with pytest.raises((BadRequest, Unsupported)) as caught:
        SamplingParams(**given)
    assert says in str(caught.value) and caught.value.field == next(iter(given))


def test_fields_that_ask_for_nothing_are_taken() -> None:
    assert SamplingParams(best_of=None, use_beam_search=False, length_penalty=1.0) == SamplingParams()
    assert SamplingParams(flat_logprobs=False, skip_reading_prefix_cache=None, stream_interval=None) == SamplingParams()


def test_methods_and_arguments_of_vllm_that_are_not_there_say_what_to_use(llm: LLM) -> None:
    with pytest.raises(AttributeError, match="LLM has no llm_engine: the engine is `core`"):
        llm.llm_engine  # noqa: B018
    with pytest.raises(AttributeError, match=r"LLM has no shutdown: use close\(\)"):
        llm.shutdown()
    with pytest.raises(TypeError, match=r"generate\(\) has no argument .prompt_token_ids.: give "):
        llm.generate(prompt_token_ids=[[1, 2, 3]])
    with pytest.raises(TypeError, match=r"generate\(\) has no argument 'temperature': give SamplingParams\(temperature=...\)"):
        llm.generate("Hello", temperature=0)
    with pytest.raises(TypeError, match=r"chat\(\) has no argument 'sampling_param': did you mean 'sampling_params'\?"):
        llm.chat([{"role": "user", "content": "a"}], sampling_param=SamplingParams())
    with pytest.raises(TypeError, match=r"has no argument 'frobnicate'$"):
        llm.embed("Hello", frobnicate=1)
    with pytest.raises(TypeError, match=r"embed\(\) has no argument 'pooling_params': use the arguments pooling and normalize"):
        llm.embed("Hello", pooling_params=object())


def test_arguments_of_vllm_that_ask_for_nothing_are_taken(llm: LLM) -> None:
    params, messages = SamplingParams(temperature=0, max_tokens=2), [{"role": "user", "content": "Hello"}]
    plain = llm.chat(messages, params, use_tqdm=False)
    same = llm.chat(messages, params, use_tqdm=False, chat_template_content_format="auto", mm_processor_kwargs=None)
    assert same[0].outputs[0].token_ids == plain[0].outputs[0].token_ids


def test_classes_of_vllm_are_there_or_their_import_says_what_to_use() -> None:
    assert ridgeline.StructuredOutputsParams is StructuredOutputs
    for name in CLASSES:
        with pytest.raises(ImportError, match=f"ridgeline has no {name}: "):
            getattr(ridgeline, name)
    assert not hasattr(ridgeline, "Frobnicate")


def test_top_p_of_0_is_the_likeliest_token_as_on_the_server() -> None:
    assert SamplingParams(top_p=0).top_p == ONLY_THE_LIKELIEST
    with pytest.raises(BadRequest, match="top_p must be a number greater than 0"):
        SamplingParams(top_p=-0.1)


def test_parameters_that_were_changed_are_checked_again(llm: LLM) -> None:
    """`params = llm.get_default_sampling_params()`, and then `params.stop = "END"`: it ended at an E; n of 0 waited for ever."""
    greedy = SamplingParams(temperature=0, max_tokens=8)
    whole = llm.generate("Hello", greedy, use_tqdm=False)[0].outputs[0].text
    stop: Any = whole[2:5]
    greedy.stop = stop
    ended, = llm.generate("Hello", greedy, use_tqdm=False)[0].outputs
    assert (ended.text, ended.stop_reason) == (whole[: whole.index(stop)], stop)
    assert greedy.stop == stop                           # the caller's own is as it was
    for name, value in (("top_p", 2.0), ("max_tokens", 0), ("stop_token_ids", [-1])):
        changed = SamplingParams()
        setattr(changed, name, value)
        with pytest.raises(BadRequest, match=rf"^{name} "):
            llm.generate(["Hello", "What"], [SamplingParams(), changed], use_tqdm=False)
