"""A server whose steps take a given time: server, scheduler, prefix cache and tokens are real, the time of a step is not.

    python paced_server.py front '{"port": 8101, "model": FOLDER, ...}'      the server; otherwise this is its engine's process

A tiny model with dummy weights computes each step, and the step then waits until `fixed + row · rows + token · prompt tokens`
seconds have passed. So four replicas on one machine take as long as on four, whatever else runs there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.engine.core.engine_process import main
from ridgeline.messages import StepPlan
from ridgeline.runner.runner import Runner
from ridgeline.server.lifecycle import run as run_server
from ridgeline.server.options import ServerOptions

PACE = "RIDGELINE_STUDY_PACE"        # fixed, row, token
STEPS = "RIDGELINE_STUDY_STEPS"      # a file that gets the seconds that steps should take and took
IDLE = 0.05                          # seconds between two steps from which the engine had nothing to do
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class PacedLLM(AsyncLLM):
    engine_module = "paced_server"


def write_model(path: Path) -> Path:
    """One token per byte: a word of a prompt is about six tokens."""
    path.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE, "add_bos_token": False}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 16_384, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "bos_token_id": 256, "eos_token_id": 257,
        "tie_word_embeddings": False, "torch_dtype": "float32", "hidden_act": "silu",
    }))
    return path


def front(settings: dict[str, Any]) -> None:
    os.environ[PACE], os.environ[STEPS] = json.dumps(settings["pace"]), settings["steps"]
    llm = PacedLLM(
        settings["model"], load_format="dummy", device="cpu", dtype="float32", num_gpu_blocks_override=settings["blocks"],
        max_model_len=16_384, max_num_seqs=settings["rows"], max_num_batched_tokens=settings["budget"], step_time_ms=0.0,
    )
    options = ServerOptions(port=settings["port"], drain_timeout=0)
    run_server(llm, options, lambda done, total: None, lambda service, address: None)


def pace_steps(fixed: float, row: float, token: float, file: Path) -> None:
    whole = Runner.submit
    given, spent, ended, written = 0.0, 0.0, 0.0, 0.0

    def submit(self: Runner, plan: StepPlan) -> None:
        nonlocal given, spent, ended, written
        began, seconds = time.monotonic(), 0.0
        if len(plan.rows):
            prompts = plan.num_tokens[plan.num_tokens > 1]
            seconds = fixed + row * (len(plan.rows) - len(prompts)) + token * int(prompts.sum())
        whole(self, plan)
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        now = time.monotonic()
        if seconds:                                      # what the engine does between two steps is late as well
            given, spent = given + seconds, spent + now - (ended if began - ended < IDLE else began)
        ended = now
        if now - written > 0.2:
            file.write_text(json.dumps([given, spent]))
            written = now

    Runner.submit = submit                               # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1] == "front":
        front(json.loads(sys.argv[2]))
    else:
        pace_steps(*json.loads(os.environ[PACE]), Path(os.environ[STEPS]))
        sys.exit(main(sys.argv[1]))
