"""Vectors of prompts: the engine's against transformers', whatever else runs beside them, and OpenAI's client for them."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
import torch
from served_model import ServerProcess, write_model
from tiny_configs import VOCAB
from tiny_models import build_model, save_checkpoint

from ridgeline import LLM, SamplingParams
from ridgeline.config import EngineConfig
from ridgeline.engine.core.core import EngineCore
from ridgeline.errors import BadRequest
from ridgeline.messages import Request
from ridgeline.server.api.openai.embeddings import EmbeddingRequest, Vectors, embedding_of
from ridgeline.server.api.openai.vector_bytes import vector_bytes

NAME = "tiny"
PROMPTS = [[(7 * place + 3 * number) % VOCAB for place in range(length)] for number, length in enumerate((1, 5, 40, 23, 40))]


def pooled(kind: str) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=0, pooling=kind)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, Any]:
    """Prompts come in chunks, and begin alike: what a prefix cache would spare, a mean must still see."""
    path = save_checkpoint(request.param, tmp_path_factory.mktemp("embeddings") / request.param)
    options: dict[str, Any] = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 100, "max_num_batched_tokens": 16,
                               "kv_cache_dtype": "float32"}
    return LLM(path, skip_tokenizer_init=True, max_num_seqs=4, **options), build_model(request.param).eval()


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_vectors_are_those_of_transformers(case: tuple[LLM, Any], kind: str) -> None:
    llm, model = case
    for _ in range(2):                                   # the second time the prefix cache knows the prompts
        outputs = llm.generate(PROMPTS, pooled(kind))
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            with torch.no_grad():
                hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
            expected = hidden[-1] if kind == "last" else hidden.mean(0)
            assert output.hidden is not None and output.hidden.dtype == np.float32
            np.testing.assert_allclose(output.hidden, expected.numpy(), rtol=2e-3, atol=2e-4)
    assert kind == "mean" or outputs[2].num_cached_tokens > 0


def test_answers_beside_them_are_the_same(case: tuple[LLM, Any]) -> None:
    llm, _ = case
    greedy = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    alone = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy)]
    mixed = [params for _ in PROMPTS for params in (greedy, pooled("mean"))]
    outputs = llm.generate([prompt for prompt in PROMPTS for _ in range(2)], mixed)
    assert [output.outputs[0].token_ids for output in outputs[::2]] == alone
    assert all(output.hidden is None for output in outputs[::2])


def test_a_mean_survives_preemption(tmp_path: Path) -> None:
    """A prompt that is half summed up loses its row and begins again, and its sum with it."""
    path = save_checkpoint("llama", tmp_path / "llama")
    core = EngineCore.start(EngineConfig.of(
        model=str(path), dtype="float32", block_size=4, num_gpu_blocks_override=60, max_num_batched_tokens=8, max_num_seqs=4,
        enable_prefix_caching=False, skip_tokenizer_init=True, kv_cache_dtype="float32",
    ))
    for number in range(3):
        core.add(Request(f"v{number}", PROMPTS[2], pooled("mean")))
    preempted, found = set(), {}
    while core.has_work:
        for delta in core.step():
            assert delta.hidden is not None
            found[delta.request_id] = delta.hidden
        for sequence in core.scheduler._running.rows.running():
            half_done = sequence.prefill.hidden is not None
            if half_done and sequence.request.request_id not in preempted and not sequence.prefill.done:
                preempted.add(sequence.request.request_id)
                core.scheduler._preempt(sequence)        # as if another request needed the blocks
                break
    core.close()
    with torch.no_grad():
        expected = build_model("llama").eval().model(torch.tensor([PROMPTS[2]])).last_hidden_state[0].mean(0).numpy()
    assert preempted and len(found) == 3
    for vector in found.values():
        np.testing.assert_allclose(vector, expected, rtol=2e-3, atol=2e-4)


def test_what_pooling_needs() -> None:
    for wrong in ({"pooling": "max", "max_tokens": 1}, {"pooling": "last"}, {"pooling": "last", "max_tokens": 1, "n": 2}):
        with pytest.raises(BadRequest, match=r"^pooling"):
            SamplingParams(**wrong)


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model: Path = write_model(tmp_path_factory.mktemp("model") / NAME)
    options = ("--load-format", "dummy", "--num-gpu-blocks-override", "200", "--max-num-seqs", "4", "--max-model-len", "256")
    with ServerProcess(str(model), *options) as server:
        yield server.url


def test_openais_client(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    by_text = client.embeddings.create(model=NAME, input=["Hello", "Good day"])
    assert by_text.usage.prompt_tokens == by_text.usage.total_tokens == 13 and by_text.model == NAME
    assert [item.index for item in by_text.data] == [0, 1]
    for item in by_text.data:
        assert len(item.embedding) == 32 and abs(np.linalg.norm(item.embedding) - 1) < 1e-5
    floats = client.embeddings.create(model=NAME, input="Good day", encoding_format="float").data[0].embedding
    np.testing.assert_allclose(floats, by_text.data[1].embedding, atol=1e-6)
    tokens = httpx.post(f"{url}/tokenize", json={"prompt": "Good day"}).json()["tokens"]
    for given in (tokens, [tokens]):
        np.testing.assert_allclose(client.embeddings.create(model=NAME, input=given).data[0].embedding, floats, atol=1e-6)
    mean = client.embeddings.create(model=NAME, input="Good day", extra_body={"pooling": "mean"}).data[0].embedding
    assert abs(np.linalg.norm(mean) - 1) < 1e-5 and not np.allclose(mean, floats, atol=1e-3)
    raw = httpx.post(f"{url}/v1/embeddings", json={"input": "Good day", "encoding_format": "base64"}).json()
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4"), floats, atol=1e-6)


KINDS: dict[Any, tuple[torch.dtype, torch.dtype]] = {
    "float32": (torch.float32, torch.float32), "float16": (torch.float16, torch.float16),
    "bfloat16": (torch.bfloat16, torch.int16), "fp8_e4m3": (torch.float8_e4m3fn, torch.uint8),
    "fp8_e5m2": (torch.float8_e5m2, torch.uint8),
}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_rounded_as_torch_does(kind: Any) -> None:
    noise = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    edges = np.array([0.0, -0.0, 448, 463, 464, 465, -480, 57344, 61439, 61440, 1e9, 1 / 32, 1 / 1024, 3 / 1024], np.float32)
    vector = np.concatenate([noise, noise * 1e-3, noise * 1e-6, noise * 100, edges])
    type_, view = KINDS[kind]
    assert vector_bytes(vector, kind, "native") == torch.from_numpy(vector).to(type_).view(view).numpy().tobytes()
    swapped = np.frombuffer(vector_bytes(vector, kind, "big"), f">u{type_.itemsize}")
    assert (swapped == np.frombuffer(vector_bytes(vector, kind, "little"), f"<u{type_.itemsize}")).all()


def test_dimensions_and_encodings(url: str) -> None:
    def sent(**body: Any) -> httpx.Response:
        reply = httpx.post(f"{url}/v1/embeddings", json={"input": ["Good day", "x"]} | body)
        assert reply.status_code == 200, reply.text
        return reply

    whole = np.array([each["embedding"] for each in sent().json()["data"]])
    short = np.array([each["embedding"] for each in sent(dimensions=8).json()["data"]])
    np.testing.assert_allclose(short, whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True), atol=1e-5)
    half = sent(encoding_format="base64", embed_dtype="float16", endianness="big").json()["data"][1]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(half), ">f2"), whole[1], atol=1e-3)
    binary = sent(encoding_format="bytes", dimensions=8)
    about = json.loads(binary.headers["metadata"])
    assert binary.headers["content-type"] == "application/octet-stream" and about["usage"]["prompt_tokens"] == 9
    for item, vector in zip(about["data"], short, strict=True):
        assert item["shape"] == [8] and (item["embed_dtype"], item["endianness"]) == ("float32", "native")
        np.testing.assert_allclose(np.frombuffer(binary.content[item["start"] : item["end"]], np.float32), vector, atol=1e-5)
    bare = sent(encoding_format="bytes_only", dimensions=8)
    np.testing.assert_allclose(np.frombuffer(bare.content, np.float32).reshape(2, 8), short, atol=1e-5)
    assert "metadata" not in bare.headers


def test_ollamas_vectors_are_the_same(url: str) -> None:
    known = httpx.post(f"{url}/v1/embeddings", json={"input": "Good day"}).json()["data"][0]["embedding"]
    many = httpx.post(f"{url}/api/embed", json={"model": NAME, "input": ["x", "Good day"]}).json()
    np.testing.assert_allclose(many["embeddings"][1], known, atol=1e-5)
    assert many["prompt_eval_count"] == 9 and many["model"] == NAME and many["total_duration"] > 0
    one = np.array(httpx.post(f"{url}/api/embeddings", json={"model": NAME, "prompt": "Good day"}).json()["embedding"])
    np.testing.assert_allclose(one / np.linalg.norm(one), known, atol=1e-5)
    assert httpx.post(f"{url}/api/embed", json={"model": NAME, "input": []}).json()["embeddings"] == []
    long = {"model": NAME, "input": "x" * 300}
    assert httpx.post(f"{url}/api/embed", json=long).status_code == 200
    refused = httpx.post(f"{url}/api/embed", json=long | {"truncate": False})
    assert refused.status_code == 400 and "maximum context length" in refused.json()["error"]


@pytest.mark.parametrize(("body", "status", "words"), [
    ({"input": "x", "dimensions": 33}, 400, "dimensions must be between 1 and 32"),
    ({"input": "x", "dimensions": 0}, 400, "dimensions must be 1 or more, got 0"),
    ({"input": "x", "normalize": True, "use_activation": False}, 400, "two names of the same field"),
    ({"input": []}, 400, "input must be a text"),
    ({"input": ["a", 1]}, 400, "input must be a text"),
    ({"input": ""}, 400, "the prompt is empty"),
    ({"input": "x" * 300}, 400, "maximum context length is 256"),
    ({"input": "x", "encoding_format": "int8"}, 400, "encoding_format: invalid enum value 'int8'"),
    ({"input": "x", "pooling": "max"}, 400, "pooling: invalid enum value 'max'"),
    ({"input": "x", "model": "other"}, 404, "not served here"),
    ({"input": [[260]]}, 400, "260"),
])
def test_what_is_refused(url: str, body: dict[str, Any], status: int, words: str) -> None:
    reply = httpx.post(f"{url}/v1/embeddings", json=body)
    assert reply.status_code == status and words in reply.json()["error"]["message"], reply.text
    health = httpx.get(f"{url}/health").json()
    assert health["requests"] == 0 and health["free_blocks"] == health["num_blocks"]


def test_vectors_wait_as_json_and_not_as_objects() -> None:
    """2,048 vectors of 4,096 numbers took 270 MB as lists of floats."""
    rows = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    vectors = Vectors(EmbeddingRequest(input="a"), list(rows))
    written = [each.embedding for each in vectors.as_json()]
    assert all(isinstance(each, msgspec.Raw) for each in written)
    assert [json.loads(bytes(each)) for each in written] == rows.tolist()        # type: ignore[call-overload]


def test_vectors_count_as_long_as_they_are_written() -> None:
    rows = [np.random.default_rng(0).standard_normal(512).astype(np.float32)]
    for encoding in ("float", "base64"):
        vectors = Vectors(EmbeddingRequest(input="a", encoding_format=encoding), rows)       # type: ignore[arg-type]
        assert 0.7 < len(msgspec.json.encode(vectors.as_json())) / vectors.num_json_bytes < 1.3


def test_too_many_dimensions_are_refused_before_the_engine_is_asked() -> None:
    service = SimpleNamespace(llm=SimpleNamespace(hidden_size=32), check_routing=lambda *_: None)
    request = EmbeddingRequest(input="a", dimensions=33)
    with pytest.raises(BadRequest, match="dimensions must be between 1 and 32"):
        asyncio.run(embedding_of(service, request, 1))   # type: ignore[arg-type]
    service.llm.hidden_size = 64
    assert asyncio.run(embedding_of(service, request, 1)).prompts == ["a"]           # type: ignore[arg-type]
