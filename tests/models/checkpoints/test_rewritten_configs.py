"""Quantised checkpoints whose configuration transformers has read and written again, with every field that its classes have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import DIALECTS, save_quantised, set_quantization
from transformers import AutoConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from ridgeline.errors import ModelError
from ridgeline.models.model_config import load_model_config

CLASSES = {
    name: AUTO_QUANTIZATION_CONFIG_MAPPING[method] for name, (config, _) in DIALECTS.items()
    if (method := config["quant_method"]) in ("awq", "gptq", "auto-round", "fp8", "fbgemm_fp8", "mxfp4", "bitnet")
}


def write_again(path: Path, kind: Any, **more: Any) -> None:
    """As `save_pretrained` leaves it after `from_pretrained`."""
    config = AutoConfig.from_pretrained(path)
    config.quantization_config = kind.from_dict(config.quantization_config | more)
    config.dtype = torch.float32
    config.save_pretrained(path)


@pytest.mark.parametrize("dialect", CLASSES)
def test_a_config_that_transformers_wrote_again_is_the_same(dialect: str, tmp_path: Path) -> None:
    path, _ = save_quantised(dialect, tmp_path)
    before = load_model_config(path)
    unblocked = {"weight_block_size": None} if dialect == "fp8-static" else {}       # transformers' default is a size
    write_again(path, CLASSES[dialect], **unblocked)
    assert load_model_config(path) == before


@pytest.mark.parametrize(("dialect", "more", "says"), [
    ("fp8-block", {"expert_dtype": "fp4"}, "expert_dtype 'fp4' is not supported"),
    ("fp8-block", {"modules_to_convert": ["model.embed_tokens"]}, "modules_to_convert is not known"),
    ("awq", {"modules_in_block_to_quantize": [["self_attn.q_proj"]]}, "modules_in_block_to_quantize is not known"),
])
def test_what_else_transformers_means_is_refused_by_name(dialect: str, more: dict[str, Any], says: str, tmp_path: Path) -> None:
    path, _ = save_quantised(dialect, tmp_path)
    set_quantization(path, DIALECTS[dialect][0] | more)
    with pytest.raises(ModelError, match=says):
        load_model_config(path)
