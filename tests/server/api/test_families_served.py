"""A directory of each family of docs/supported-models.md's mixtures and latents, and of some dense ones, starts as a server and
streams a chat: real layouts with tiny random weights, and the text that the same model gives without a server."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from served_model import ServerProcess, write_model
from tiny_models import save_checkpoint

from ridgeline import LLM, SamplingParams

pytestmark = pytest.mark.slow

FAMILIES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss", "llama4",
    "olmo2", "granite", "glm4", "cohere2", "starcoder2", "smollm3", "phi3-long",
)
MESSAGES = [{"role": "user", "content": "hello"}]


def with_tokenizer(name: str, path: Path) -> Path:
    """The checkpoint, with a byte-level tokenizer and a chat template beside it."""
    write_model(path / "texts")
    vocab = json.loads((path / "texts" / "config.json").read_text())["vocab_size"]
    folder = save_checkpoint(name, path / "model", vocab_size=vocab, bos_token_id=256, eos_token_id=257, pad_token_id=256)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((path / "texts" / file).read_bytes())
    return folder


def streamed(url: str, model: str) -> str:
    body = {"model": model, "messages": MESSAGES, "stream": True, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    parts, ended = [], False
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                parts.append((delta.get("reasoning_content") or "") + (delta.get("content") or ""))
            ended |= line.startswith(b"data: [DONE]")
    assert ended
    return "".join(parts)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_streams_a_chat_from_its_directory(tmp_path: Path, name: str) -> None:
    folder = with_tokenizer(name, tmp_path)
    llm = LLM(str(folder), dtype="float32", max_model_len=96)
    alone = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0].outputs[0].text
    llm.close()
    with ServerProcess(str(folder), "--dtype", "float32", "--max-model-len", "96") as server:
        said = streamed(server.url, folder.name)
    assert said == alone
