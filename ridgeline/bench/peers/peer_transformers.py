"""transformers' `generate` on the same model and dtype, for comparison. Ridgeline itself does not need transformers."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ridgeline.errors import ConfigError


class TransformersPeer:
    name = "transformers"

    def __init__(self, path: Path, dtype: str) -> None:
        try:
            transformers: Any = importlib.import_module("transformers")
        except ImportError:
            command = f"{sys.executable} -m pip install transformers accelerate"
            raise ConfigError(f"--against transformers needs that package: {command}") from None
        where: dict[str, Any] = {"pretrained_model_name_or_path": path}
        if path.suffix == ".gguf":
            where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        self._model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype)).eval()

    def bytes_per_weight(self, requests: int) -> float:
        return float(next(self._model.parameters()).element_size())

    def run(self, prompts: list[list[int]], tokens_out: int) -> list[float]:
        """Only the total time is visible from outside: it also stands for every request's first token."""
        inputs = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                inputs, attention_mask=torch.ones_like(inputs), do_sample=False, pad_token_id=0,
                min_new_tokens=tokens_out, max_new_tokens=tokens_out,
            )
        total = time.perf_counter() - start
        return [total, total]
