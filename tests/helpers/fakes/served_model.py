"""A tiny model directory that a server can start on: config.json and a byte-level tokenizer with a chat template.

Its weights are dummy ones, so answers are noise, but the same noise every time. And the server itself, as a process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import warm_start
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 8192


def write_model(path: Path, hidden_size: int = 32) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE, "add_bos_token": False}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": hidden_size, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "bos_token_id": 256, "eos_token_id": 257, "tie_word_embeddings": False, "torch_dtype": "float32",
        "hidden_act": "silu",
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def one_thread() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


class ServerProcess:
    """`ridgeline serve` on a free port. Leaving the context stops it with Ctrl-C and checks that it went in order."""

    def __init__(self, *options: str, cold: bool = False) -> None:
        command = [sys.executable, "-m", "ridgeline", "serve", "--port", "0", *options]
        self.process = (subprocess.Popen if cold else warm_start.WarmPopen)(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=one_thread()
        )
        self.url = ""

    def wait_ready(self) -> str:
        """The address, once the server has printed it."""
        assert self.process.stdout is not None and self.process.stderr is not None
        for line in self.process.stdout:
            if line.startswith("ready: "):
                self.url = line.split()[1].removesuffix("/v1")
            if line.startswith("curl "):
                return self.url
        raise AssertionError(f"the server did not start: {self.process.stderr.read()}")

    def stop(self, number: int = signal.SIGINT) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(120)

    def __enter__(self) -> ServerProcess:
        self.wait_ready()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        code = self.stop()
        assert kind is not None or code == 0, self.process.stderr and self.process.stderr.read()


def wait_until(condition: object, seconds: float = 60.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
