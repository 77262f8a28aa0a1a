"""Every family that this engine runs, and how one is found by the name that a checkpoint gives it."""

import re
from collections.abc import Callable, Sequence

from ridgeline.errors import ModelError
from ridgeline.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, DOTS1, GLM4_MOE_LITE, MINICPM3, YOUTU
from ridgeline.models.families.ernie import ERNIE, ERNIE_MOE
from ridgeline.models.families.exaone import EXAONE, EXAONE4, EXAONE_MOE
from ridgeline.models.families.gemma import GEMMA, GEMMA2, GEMMA3, VAULT_GEMMA
from ridgeline.models.families.glm import GLM, GLM4, GLM4_MOE, SOLAR_OPEN
from ridgeline.models.families.gpt_oss import GPT_OSS
from ridgeline.models.families.granite import GRANITE, GRANITE_4, GRANITE_MOE, GRANITE_MOE_SHARED, HYPERCLOVAX
from ridgeline.models.families.hunyuan import HUNYUAN, HUNYUAN_MOE
from ridgeline.models.families.layer_normed.cohere import COHERE, COHERE2
from ridgeline.models.families.layer_normed.falcon import FALCON
from ridgeline.models.families.layer_normed.gpt2 import GPT2, GPT_BIGCODE, GPT_NEO
from ridgeline.models.families.layer_normed.gpt_neox import GPT_NEOX
from ridgeline.models.families.layer_normed.gptj import CODEGEN, GPTJ
from ridgeline.models.families.layer_normed.nemotron import JAIS2, NEMOTRON
from ridgeline.models.families.layer_normed.opt import OPT
from ridgeline.models.families.layer_normed.phi import PHI, PHIMOE
from ridgeline.models.families.layer_normed.stablelm import STABLELM
from ridgeline.models.families.layer_normed.starcoder2 import STARCODER2
from ridgeline.models.families.llama import (
    APERTUS,
    ARCEE,
    BITNET,
    CWM,
    HELIUM,
    INTERNLM2,
    LLAMA,
    LLAMA4,
    MINICPM,
    SEED_OSS,
    SMOLLM3,
)
from ridgeline.models.families.minimax import MINIMAX_M2
from ridgeline.models.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL, MIXTRAL
from ridgeline.models.families.olmo import FLEX_OLMO, OLMO, OLMO2, OLMO3, OLMOE
from ridgeline.models.families.phi3 import PHI3
from ridgeline.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from ridgeline.models.family import Family

FAMILIES = (
    LLAMA, MISTRAL, MINISTRAL, MINISTRAL3, QWEN2, QWEN3, PHI3, GEMMA, GEMMA2, VAULT_GEMMA, GEMMA3, SMOLLM3, CWM, SEED_OSS, ERNIE,
    ARCEE, APERTUS, OLMO2, OLMO3, GRANITE, GRANITE_4, HELIUM, HUNYUAN, GLM, GLM4, COHERE, COHERE2, STARCODER2, EXAONE4, NEMOTRON,
    STABLELM, PHI, GPT_NEOX, GPT2, MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITE_MOE, GRANITE_MOE_SHARED, GLM4_MOE, ERNIE_MOE,
    HUNYUAN_MOE, PHIMOE, DOTS1, MINIMAX_M2, LLAMA4, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, MINICPM3, YOUTU,
    OLMO, FLEX_OLMO, SOLAR_OPEN, EXAONE, EXAONE_MOE, INTERNLM2, MINICPM, GPTJ, OPT, GPT_BIGCODE,
    FALCON, BITNET, HYPERCLOVAX, GPT_NEO, CODEGEN, JAIS2,
)

# What people try and this engine does not compute: beginnings of names, and why.
REFUSED = {
    "a state-space model, or a hybrid with one": (
        "Bamba", "FalconH1", "FalconMamba", "Jamba", "Mamba", "NemotronH", "Plamo2", "RecurrentGemma", "Rwkv", "ARwkv", "xLSTM",
        "Zamba", "Zaya",
    ),
    "layers of linear attention": (
        "BailingHybrid", "BailingMoeV2_5", "KimiLinear", "MiniMaxForCausalLM", "MiniMaxText01", "OlmoHybrid", "Qwen3Next",
        "Qwen3_5", "Qwen4",
    ),
    "layers of short convolutions": ("Lfm2",),
    "sparse attention with an indexer": ("DeepseekV32", "DeepseekV4", "GlmMoeDsa"),
    "embeddings for every layer and keys that layers share": ("Gemma3n", "Gemma4"),
    "an encoder and a decoder": (
        "Bart", "BigBirdPegasus", "Blenderbot", "MBart", "MT5", "Marian", "Mvp", "PLBart", "Pegasus", "ProphetNet", "T5", "TrOCR",
        "UMT5", "Whisper",
    ),
    "positions as biases of the scores (ALiBi)": ("Bloom", "Mpt", "Refact", "JAISLMHead", "jais"),
    "attention as the difference of two softmaxes": ("DiffLlama",),
    "bytes in patches in the place of tokens": ("Blt",),
    "answers that are made by diffusion, not from left to right": ("Dream", "LLaDA", "RND1"),
    "sound, not text": ("Moshi", "Musicgen", "Wavtokenizer"),
    "an encoder, which generates no text": (
        "Albert", "Bert", "BigBird", "Camembert", "Data2Vec", "Deberta", "DistilBert", "Electra", "ErnieForCausalLM", "EuroBert",
        "GemmaEmbedding", "JinaBert", "MegatronBert", "ModernBert", "NeoBert", "NomicBert", "RemBert", "RoCBert", "RoFormer",
        "Roberta", "XLMRoberta", "Xmod",
    ),
}
WHOLE = frozenset({"jais"})          # names that are no beginnings: Jais-2 is another model


def _reason(architecture: object) -> str:
    """By names of config.json and of GGUF files, which have their own capitals and hyphens."""
    if not isinstance(architecture, str):
        return ""
    given = _letters(architecture)
    for reason, names in REFUSED.items():
        if any(given == name if name in WHOLE else given.startswith(_letters(name)) for name in names):
            return f" ({reason})"
    return ""


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def family_of_type(model_type: object, where: str) -> Family:
    """Of a config.json without `architectures`."""
    for family in FAMILIES:
        if family.name == model_type:
            return family
    raise ModelError(f"{where}: architectures is missing, and model_type {model_type!r} is not known")


def family_of(
    architecture: object, known: Callable[[Family], Sequence[str]], where: str, language_model: object = None
) -> Family:
    """`language_model`: the type of a checkpoint's language model, where several families have the same name."""
    found = [family for family in FAMILIES if architecture in known(family)]
    if found:
        return next((family for family in found if family.name == language_model), found[0])
    usual, all_names = ([name for family in FAMILIES for name in known(family)[:most]] for most in (1, None))
    names = list(dict.fromkeys([*usual, *all_names]))
    supported = f"{', '.join(names[:8])} and {len(names) - 8} more (docs/supported-models.md)"
    raise ModelError(f"{where}: architecture {architecture!r} is not supported{_reason(architecture)}; supported: {supported}")


def gguf_family(architecture: object, score: str | None, windowed: bool, where: str) -> Family:
    """GGUF has one name for families that differ in their experts or windows: Mixtral is a llama with experts, DeepSeek-V3 a
    deepseek2 with sigmoid scores, OLMo-3 an olmo2 with a window. `score`: of a file with experts, "" where it does not say."""
    kind = family_of(architecture, lambda each: (each.gguf, *each.gguf_also) if each.gguf else (), where)
    found = [
        family for family in FAMILIES if family.gguf == kind.gguf and (
            score is None if family.experts is None else score is not None and score in ("", family.experts.score))
    ]
    if found:
        return next((family for family in found if (family.window != "none") == windowed), found[0])
    experts = "without experts" if score is None else f"with experts of {score} scores" if score else "with experts"
    raise ModelError(f"{where}: {kind.gguf} {experts} is not supported")
