"""Writes docs/supported-models.md from the family declarations: `python scripts/make_models_page.py --write`."""

from __future__ import annotations

import sys
from pathlib import Path

from generated_page import write_or_compare

from ridgeline.models.checkpoints.gguf_formats import FORMATS as PACKED
from ridgeline.models.checkpoints.quantisation import READERS
from ridgeline.models.families.all_families import FAMILIES, WITH_MORE
from ridgeline.models.family import Family
from ridgeline.models.gguf_types import TENSOR_TYPES
from ridgeline.quant.layout import STORED_KINDS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "supported-models.md"
HEAD = """\
# Supported models

<!-- Written by scripts/make_models_page.py from ridgeline/models; `make docs` writes it again. -->

There is one decoder (`ridgeline/models/decoder.py`). A family is a declaration of how it differs from Llama. Each is
compared with transformers on small random checkpoints (`tests/models/test_families.py`). GGUF files are, too, as llama.cpp's
converter would write them; † the names and fields of these files were compared with the converter by hand, and no test has one.

| family | models | `architectures` in config.json | GGUF | differs from Llama by |
|---|---|---|---|---|
"""
MODELS = {
    "llama": "Llama 2, 3, 3.1, 3.2 (text), 3.3; SmolLM2; TinyLlama; Falcon 3; Yi; InternLM3; IQuest-Coder (not its Loop models)",
    "mistral": "Mistral 7B and models derived from it; Mistral Small 3 (text)",
    "ministral3": "Ministral 3 (text)", "llama4": "Llama 4 Scout, Maverick (text)",
    "qwen2": "Qwen2, Qwen2.5, Qwen2.5-Coder; MiMo 7B; Qwen2-VL, Qwen2.5-VL (text)", "qwen3": "Qwen3 (dense); Qwen3-VL (text)",
    "phi3": "Phi-3, Phi-4-mini", "gemma": "Gemma, CodeGemma", "gemma2": "Gemma 2",
    "vaultgemma": "VaultGemma", "cwm": "CWM 32B", "youtu": "Youtu-LLM", "ministral": "Ministral 8B",
    "gemma3": "Gemma 3 (text)", "smollm3": "SmolLM3", "seed_oss": "Seed-OSS", "ernie4_5": "ERNIE 4.5 (dense)",
    "ernie4_5_moe": "ERNIE 4.5 (21B-A3B, 300B-A47B)",
    "arcee": "Arcee AFM", "olmo2": "OLMo 2", "olmo3": "OLMo 3", "granite": "Granite 3 (dense)",
    "granitemoehybrid": "Granite 4 without state-space layers (350M, 1B, Micro)",
    "granitemoeshared": "Granite mixtures with a shared expert",
    "helium": "Helium", "hunyuan_v1_dense": "Hunyuan 0.5B to 7B", "hunyuan_v1_moe": "Hunyuan A13B", "dots1": "dots.llm1",
    "minimax_m2": "MiniMax-M2, M2.1", "glm": "GLM-4-9B (hf)",
    "glm4": "GLM-4-0414", "cohere": "Command R", "cohere2": "Command R7B, Command A", "starcoder2": "StarCoder2",
    "exaone4": "EXAONE 4", "nemotron": "Nemotron 4, Minitron", "mixtral": "Mixtral 8x7B, 8x22B",
    "qwen2_moe": "Qwen1.5-MoE, Qwen2-57B-A14B", "olmoe": "OLMoE",
    "qwen3_moe": "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder; Qwen3-VL mixtures (text)",
    "granitemoe": "Granite 3 (mixtures)", "glm4_moe": "GLM-4.5, GLM-4.6", "gpt_oss": "gpt-oss 20b, 120b",
    "deepseek_v2": "DeepSeek-V2, V2-Lite", "deepseek_v3": "DeepSeek-V3, R1, Kimi-K2", "glm4_moe_lite": "GLM-4.7-Flash",
    "minicpm3": "MiniCPM3", "apertus": "Apertus 8B, 70B",
    "stablelm": "StableLM 3B, StableLM 2 1.6B", "phi": "Phi-1, 1.5, 2",
    "phimoe": "Phi-3.5-MoE", "gpt_neox": "Pythia, GPT-NeoX-20B", "gpt2": "GPT-2",
    "olmo": "OLMo 1B, 7B", "flex_olmo": "FlexOlmo", "solar_open": "Solar Open 100B", "exaone": "EXAONE 3, 3.5",
    "exaone_moe": "K-EXAONE", "internlm2": "InternLM 2, 2.5", "minicpm": "MiniCPM 1, 2, 4", "gptj": "GPT-J 6B",
    "opt": "OPT (not 350M)", "gpt_bigcode": "StarCoder, SantaCoder",
    "falcon": "Falcon 7B, 40B, 180B; Falcon 2 11B (Falcon 3 is `llama`)", "bitnet": "BitNet b1.58 2B 4T",
    "hyperclovax": "HyperCLOVA X SEED Think", "gpt_neo": "GPT-Neo", "codegen": "CodeGen", "jais2": "Jais 2",
    "mistral4": "Mistral Small 4 (text)", "hy_v3": "Hunyuan 3", "phi4_multimodal": "Phi-4-multimodal, Phi-3-vision (text)",
    "mellum": "Mellum 2", "flint": "Flint",
}
FLAGS = {
    "experts": "a mixture of experts", "latent": "latent attention", "sinks": "attention sinks",
    "qkv_bias": "biases on q, k and v", "late_qk_norm": "norms behind the rotation", "qk_norm": "RMS norm on q and k",
    "wide_qk_norm": "norms over all heads of q and of k", "parallel": "attention and MLP side by side",
    "own_mlp_norm": "each behind its own norm", "learned_positions": "learned positions", "clipped": "limits on q, k and v",
    "post_norms": "norms after attention and MLP",
    "inner_norms": "norms before the output matrices of attention and MLP",
    "norm_offset": "norms times 1 + weight", "scale_embeddings": "scaled embeddings", "multipliers": "multipliers",
    "depth_scale": "multipliers by depth", "logit_scale": "scaled logits", "interleaved": "rope rotates neighbouring pairs",
    "query_pre_attn_scalar": "its own attention scale",
    "softcaps": "capped scores and logits", "partial_rotary": "partial rotation", "longrope": "longrope",
    "bare_qk_norm": "norms without weights on q and k",
    "local_rope": "a different rope for layers with a window", "tied": "tied head",
}
WINDOWS = {"all": "a sliding window on all layers or on listed ones",
           "upper": "a sliding window on upper layers, if config.json sets it",
           "pattern": "sliding windows on most layers", "chunks": "layers with a rope attend in chunks"}
TEMPERATURES = {"nope": "queries without a rope grow with their position", "all": "queries grow with their position"}
FILED_AS = {"mistral": "as `llama`", "glm4_moe_lite": "as `deepseek2` †"}        # the files of another family
BY_HAND = {"qwen2vl", "qwen3vlmoe", "exaone-moe", "minicpm3"}                      # GGUF files that no test has
MORE = """\

## Language models inside

Of a checkpoint that also sees images or hears, the language model is served, if it is one of the families above; a request with
an image is refused. `text_config` (or `llm_config`) says what it is, and all other tensors are left in the file. The
`architectures`: {names}.
"""
FORMATS = """\

## Files

- **A Hugging Face directory**: `config.json`, `*.safetensors`, `tokenizer.json`; `tokenizer_config.json`,
  `generation_config.json` and a chat template where the model has them. Fetch one with
  `hf download ORG/NAME --local-dir DIR`. No code from the directory is run.
- **A GGUF file** (version 2 or 3; of a split one the first part, with the others beside it): tensor types {types}.
  A GPU keeps packed types packed ({packed}), others are expanded to the compute dtype; a CPU keeps
  {kept} packed. Other types are refused by name. Experts of a mixture stay packed on a GPU as Q4_0 and
  MXFP4; those of other types, and all on a CPU, are expanded, which the log says.
  Where a file and transformers differ, transformers' model is computed: older files of OLMo 3 have the yarn rope's own factor
  once more as `attn_factor`, which llama.cpp multiplies, and this engine takes once.
- **A quantised checkpoint** (`quantization_config`: {methods}): see
  [what loads](techniques/quantised-checkpoints.md).
- **Random weights**: `--load-format dummy --skip-tokenizer-init` needs only `config.json`, for benchmarks.
- **The embedded model**: SmolLM2-135M-Instruct (Q4_1), fetched by `ridgeline pull`.

Weights are strict: a tensor that is missing, left over or of the wrong shape is an error before the first byte is read. So is a
head (`lm_head.weight`) that is not the embedding, where config.json says `tie_word_embeddings`.

## dtypes

| device | `--dtype auto` |
|---|---|
| NVIDIA GPU | bfloat16 or float16 as the checkpoint has it; bfloat16 for any other, and for quantised checkpoints |
| CPU | float32, for which the native kernels are written |

## Not supported

State-space models and hybrids with them (Mamba, Jamba, Bamba, Nemotron-H, Falcon-H1, Granite 4 H), linear attention (Qwen3-Next,
Qwen3.5), short convolutions (LFM2), ALiBi (BLOOM, MPT, falcon-rw, Baichuan 13B), Gemma 3n and Gemma 4, the vision models of
Llama 3.2 and PaliGemma, encoders, LoRA adapters (merge them first), images and audio; Command R+ and StableLM 2 12B (norms of
their own for every head). They are refused by name, with the reason. Checkpoints in PyTorch's own format (`*.bin`, `*.pth`) are
refused, too: reading one can run code; save it as safetensors.
"""


def differences(family: Family) -> str:
    found = [words for name, words in FLAGS.items() if getattr(family, name)]
    if family.spelled.get("attn_logit_softcapping") == "":           # a field that means nothing here
        found[found.index(FLAGS["softcaps"])] = "capped logits, if config.json sets it"
    found += ["layer norms" + " without weights" * (family.norm == "bare layer")] * (family.norm != "rms")
    found += ["no norms before attention and MLP"] * (not family.pre_norms)
    found += ["an MLP without a gate"] * (not family.gated) + ["layers without a rope"] * (family.nope != "none")
    if family.window in WINDOWS:
        found.append(WINDOWS[family.window])
    if family.temperature in TEMPERATURES:
        found.append(TEMPERATURES[family.temperature])
    if family.activation != "silu":
        found.append(f"{family.activation} activation")
    return "; ".join(found) or "–"


def gguf_names(family: Family) -> str:
    marks = {name: " †" * (name in BY_HAND or family.name == "youtu") for name in (family.gguf, *family.gguf_also)}
    return ", ".join(f"`{name}`{mark}" for name, mark in marks.items())


def page() -> str:
    rows = []
    for family in FAMILIES:
        architectures = ", ".join(f"`{name}`" for name in family.architectures)
        gguf = gguf_names(family) if family.gguf else FILED_AS.get(family.name, "–")
        rows.append(f"| {family.name} | {MODELS[family.name]} | {architectures} | {gguf} | {differences(family)} |\n")
    types = ", ".join(kind.name for kind in TENSOR_TYPES.values())
    kept = ", ".join(sorted(STORED_KINDS))
    more = MORE.format(names=", ".join(f"`{name}`" for name in WITH_MORE))
    files = FORMATS.format(types=types, packed=", ".join(PACKED), kept=kept, methods=", ".join(READERS))
    return HEAD + "".join(rows) + more + files


if __name__ == "__main__":
    sys.exit(write_or_compare(PAGE, page()))
