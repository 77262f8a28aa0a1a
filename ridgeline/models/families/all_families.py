"""Every family that this engine runs, and how one is found by the name that a checkpoint gives it."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ridgeline.errors import MOST_SHOWN, ModelError, shown
from ridgeline.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, DOTS1, GLM4_MOE_LITE, MINICPM3, YOUTU
from ridgeline.models.families.ernie import ERNIE, ERNIE_MOE
from ridgeline.models.families.exaone import EXAONE, EXAONE4, EXAONE_MOE
from ridgeline.models.families.gemma import GEMMA, GEMMA2, GEMMA3, VAULT_GEMMA
from ridgeline.models.families.glm import GLM, GLM4, GLM4_MOE, SOLAR_OPEN
from ridgeline.models.families.gpt_oss import GPT_OSS
from ridgeline.models.families.granite import GRANITE, GRANITE_4, GRANITE_MOE, GRANITE_MOE_SHARED, HYPERCLOVAX
from ridgeline.models.families.hunyuan import HUNYUAN, HUNYUAN_3, HUNYUAN_MOE
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
from ridgeline.models.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL, MISTRAL4, MIXTRAL
from ridgeline.models.families.olmo import FLEX_OLMO, OLMO, OLMO2, OLMO3, OLMOE
from ridgeline.models.families.phi3 import PHI3, PHI4_MULTIMODAL
from ridgeline.models.families.qwen import FLINT, MELLUM, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from ridgeline.models.family import FUSED_EXPERTS, NOT_TEXT, TEXT_PREFIXES, ExpertRule, Family, FusedExperts

FAMILIES = (
    LLAMA, MISTRAL, MINISTRAL, MINISTRAL3, QWEN2, QWEN3, PHI3, GEMMA, GEMMA2, VAULT_GEMMA, GEMMA3, SMOLLM3, CWM, SEED_OSS, ERNIE,
    ARCEE, APERTUS, OLMO2, OLMO3, GRANITE, GRANITE_4, HELIUM, HUNYUAN, GLM, GLM4, COHERE, COHERE2, STARCODER2, EXAONE4, NEMOTRON,
    STABLELM, PHI, GPT_NEOX, GPT2, MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITE_MOE, GRANITE_MOE_SHARED, GLM4_MOE, ERNIE_MOE,
    HUNYUAN_MOE, PHIMOE, DOTS1, MINIMAX_M2, LLAMA4, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, MINICPM3, YOUTU,
    OLMO, FLEX_OLMO, SOLAR_OPEN, EXAONE, EXAONE_MOE, INTERNLM2, MINICPM, GPTJ, OPT, GPT_BIGCODE,
    FALCON, BITNET, HYPERCLOVAX, GPT_NEO, CODEGEN, JAIS2, MISTRAL4, HUNYUAN_3, PHI4_MULTIMODAL, MELLUM, FLINT,
)

# Checkpoints that also see images or hear: their language model is served; `text_config` says which that is.
WITH_MORE = (
    "AudioFlamingo3ForConditionalGeneration", "AyaVisionForConditionalGeneration", "Cohere2VisionForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration", "FastVlmForConditionalGeneration", "Gemma3ForConditionalGeneration",
    "Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration", "Glm46VForConditionalGeneration",
    "GotOcr2ForConditionalGeneration", "Idefics2ForConditionalGeneration", "Idefics3ForConditionalGeneration",
    "InternVLChatModel", "InternVLForConditionalGeneration", "KimiK25ForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
    "LightOnOcrForConditionalGeneration", "Llama4ForConditionalGeneration", "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration", "LlavaNextVideoForConditionalGeneration", "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration", "Ovis2ForConditionalGeneration", "PerceptionLMForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration", "Qwen2VLForConditionalGeneration", "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniModel", "Qwen2_5OmniThinkerForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration", "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration", "SmolVLMForConditionalGeneration", "VideoLlama3ForConditionalGeneration",
    "VideoLlavaForConditionalGeneration", "VipLlavaForConditionalGeneration", "VoxtralForConditionalGeneration",
)
# Their language models under names of their own. Those with several positions for a token have one and the same for text.
TEXT_TYPES = {
    "qwen2_vl": "qwen2", "qwen2_vl_text": "qwen2", "qwen2_5_vl": "qwen2", "qwen2_5_vl_text": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe", "qwen3_omni_moe_text": "qwen3_moe", "gemma3_text": "gemma3",
    "llama4_text": "llama4", "glm4v_text": "glm4", "glm4v_moe_text": "glm4_moe", "kimi_k2": "deepseek_v3",
    "video_llama_3": "qwen2",
}
# What transformers assumes of a language model inside where its config is silent: such configs leave the usual sizes out.
USUAL_SIZES = {
    "llama": {"hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32,
              "vocab_size": 32_000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "mistral": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
                "num_key_value_heads": 8, "vocab_size": 32_000, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6},
    "qwen2": {"hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32, "num_attention_heads": 32,
              "vocab_size": 151_936, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6},
}
# Where a config does not say its language model's type: older ones have all fields in one object.
USUAL_TYPES = {
    "Gemma3ForConditionalGeneration": "gemma3", "Llama4ForConditionalGeneration": "llama4",
    "LlavaForConditionalGeneration": "llama",
    "Mistral3ForConditionalGeneration": "mistral", "Qwen2VLForConditionalGeneration": "qwen2",
    "Qwen2_5_VLForConditionalGeneration": "qwen2", "Qwen3VLForConditionalGeneration": "qwen3",
}
# Stored as [experts, inputs, outputs] by their makers, and as elsewhere by transformers 5.
TURNED_EXPERTS = FusedExperts(FUSED_EXPERTS[0].pattern, FUSED_EXPERTS[0].name, transposed=True, either=True)


def family_inside(architecture: str, text: Mapping[str, Any], where: str) -> Family:
    """Of the language model of a checkpoint that also sees or hears."""
    kind, named = text.get("model_type") or USUAL_TYPES.get(architecture), text.get("architectures")
    by_name = [family for family in FAMILIES if isinstance(named, list) and named and named[0] in family.architectures]
    by_type = [family for family in FAMILIES if family.name == TEXT_TYPES.get(str(kind), kind)]
    found = next(iter((*by_type, *by_name)), None)
    if found is None:
        inner = named[0] if isinstance(named, list) and named else kind
        raise ModelError(f"{where}: the language model {shown(inner)} of {architecture} is not supported{_reason(inner)}")
    found = replace(
        found, prefixes=TEXT_PREFIXES, not_text=NOT_TEXT,
        defaults={**USUAL_SIZES.get(found.name, {}), **found.defaults, **({"head_dim": None} if kind == "glm4v_text" else {})},
    )
    if kind != "qwen3_vl_moe_text":
        return found
    return replace(found, fused_experts=(TURNED_EXPERTS,), experts=ExpertRule(normalise=True))


# What people try and this engine does not compute: beginnings of names, and why.
REFUSED = {
    "a state-space model, or a hybrid with one": (
        "Bamba", "FalconH1", "FalconMamba", "Jamba", "Mamba", "NemotronH", "Plamo2", "RecurrentGemma", "Rwkv", "ARwkv", "xLSTM",
        "Zamba", "Zaya",
    ),
    "layers of linear attention": (
        "BailingHybrid", "BailingMoeV2_5", "KimiLinear", "MiniMaxForCausalLM", "MiniMaxText01", "OlmoHybrid", "Qwen3Next",
        "Qwen3_5", "Qwen4", "Qwen35",
    ),
    "layers of short convolutions": ("Inkling", "Lfm2", "Lfm3"),
    "sparse attention with an indexer": (
        "AXK2", "DeepseekV32", "DeepseekV4", "Dots3", "Glm5", "GlmMoeDsa", "GlmDsa", "HYV4", "MiniMaxM3",
    ),
    "embeddings for every layer and keys that layers share": ("Gemma3n", "Gemma4"),
    "an encoder and a decoder": (
        "Bart", "BigBirdPegasus", "Blenderbot", "Florence2", "MBart", "MT5", "Marian", "Mvp", "PLBart", "PPFormulaNet", "Pegasus",
        "Pix2Struct", "ProphetNet", "T5", "TrOCR", "UMT5", "Udop", "VisionEncoderDecoder", "Whisper",
    ),
    "positions as biases of the scores (ALiBi)": ("Bloom", "Mpt", "Refact", "JAISLMHead", "jais"),
    "ALiBi in its 13B, and a head of its own in Baichuan 2": ("Baichuan",),
    "positions as biases of the scores": ("CpmAnt", "Xlnet"),
    "positions as sines": ("CTRL", "XGLM"),
    "norms behind the additions, in the stream itself": ("OpenAIGPT",),
    "layer norms on every head of q and k": ("Fuyu", "Persimmon", "Chameleon"),
    "gates on the output of attention": ("Afmoe", "Beam", "Laguna"),
    "attention whose heads differ from layer to layer": ("Deci", "MiMoV2", "Mimo2", "OpenELM", "NemotronNAS"),
    "attention as the difference of two softmaxes": ("DiffLlama",),
    "attention over images, in layers of their own": ("Blip", "Evolla", "Idefics", "Mllama"),
    "attention by hashing": ("Reformer",),
    "masks that the model learns": ("Doge",),
    "mixtures of attention heads": ("JetMoe",),
    "two attentions in every layer, and experts that do nothing": ("LongcatFlash",),
    "layers that run several times": ("HrmText", "IQuestLoopCoder"),
    "experts of their own for images": ("CogVLM", "Ernie4_5_VL"),
    "a prompt whose tokens see each other": ("PaliGemma", "PI0", "GitForCausalLM"),
    "images as tokens of its own": ("Emu3",),
    "bytes in patches in the place of tokens": ("Blt",),
    "answers that are made by diffusion, not from left to right": ("DiffusionGemma", "Dream", "LLaDA", "RND1"),
    "sound, not text": ("MossTranscribe", "Moshi", "Musicgen", "Wavtokenizer"),
    "an encoder, which generates no text": (
        "Albert", "Bert", "BigBird", "Camembert", "CLIP", "Data2Vec", "Deberta", "DistilBert", "Electra", "ErnieForCausalLM",
        "EuroBert", "GemmaEmbedding", "JinaBert", "LlamaEmbed", "MegatronBert", "ModernBert", "NeoBert", "NomicBert", "RemBert",
        "RoCBert", "RoFormer", "Roberta", "XLMRoberta", "Xmod",
    ),
}
# Families' other heads: what follows a family's name in the names of transformers' classes, and of reward models on the hub.
OTHER_HEADS = {
    "ForSequenceClassification": "scores for whole texts",
    "ForTokenClassification": "scores for each token",
    "ForQuestionAnswering": "the place of an answer in the prompt",
    "ForProcessRewardModel": "rewards", "ForRewardModel": "rewards", "RewardModel": "rewards",
}
LANGUAGE_HEADS = ("ForCausalLM", "LMHeadModel")
NO_HEAD = ("TextModel", "Model")
# Names above that are whole, not beginnings of names: other models begin like them.
WHOLE = frozenset({"Blip", "CLIP", "Idefics", "jais"})


def _reason(architecture: object) -> str:
    """By names of config.json and of GGUF files, which have their own capitals and hyphens."""
    if not isinstance(architecture, str) or len(architecture) > MOST_SHOWN:      # of megabytes, each look takes a second
        return ""
    if refused := _refusal(architecture) or _other_head(architecture):
        return refused
    if any(_letters(architecture) == _letters(family.name) for family in FAMILIES):  # of a GGUF file, since it has no family
        return " (its GGUF files are not read yet; its Hugging Face directory is)"
    return " (no family is declared for it)"


def _refusal(architecture: str) -> str:
    given = _letters(architecture)
    alone = re.sub("(forcausallm|forconditionalgeneration|forvisiontext2text|lmheadmodel|model)$", "", given)
    for reason, names in REFUSED.items():
        if any(alone == _letters(name) if name in WHOLE else given.startswith(_letters(name)) for name in names):
            return f" ({reason})"
    return ""


def _other_head(architecture: str) -> str:
    for end, gives in OTHER_HEADS.items():
        if architecture.endswith(end) and _language_model(architecture.removesuffix(end)):
            return f" (its head gives {gives}, not text)"
    return ""


def _language_model(stem: str) -> str:
    """The class of ours whose name begins so; empty: there is none."""
    return next((stem + end for end in LANGUAGE_HEADS for each in FAMILIES if stem + end in each.architectures), "")


def _with_head(architecture: object) -> object:
    """Of a class without a head, the class of its language model: without a head of its own, it gives vectors."""
    if not isinstance(architecture, str) or architecture.endswith(LANGUAGE_HEADS):
        return architecture
    found = [_language_model(architecture.removesuffix(end)) for end in NO_HEAD if architecture.endswith(end)]
    return next(filter(None, found), architecture)


def is_headless(architectures: Any, family: Family, stored: Mapping[str, str]) -> bool:
    """Of a class without a head, and of tensors among which there is none either."""
    declared = architectures[0] if isinstance(architectures, list) and architectures else None
    return _with_head(declared) != declared and not stores_head(family, stored)


def stores_head(family: Family, stored: Mapping[str, str]) -> bool:
    head = next(name for name, target in family.names.items() if target == "head")
    return any(f".{head}." in f".{name}" for name in stored)


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def family_of_type(whole: object, model_type: object, where: str) -> Family:
    """Of a config.json without `architectures`. `whole`: the type of the model that the language model may be inside of."""
    if isinstance(whole, str) and (refused := _refusal(whole)):
        raise ModelError(f"{where}: model_type {shown(whole)} is not supported{refused}")
    for family in FAMILIES:
        if family.name == TEXT_TYPES.get(str(model_type), model_type):
            return family
    raise ModelError(f"{where}: architectures is missing, and model_type {shown(model_type)} is not known")


def family_of(architecture: object, known: Callable[[Family], Sequence[str]], where: str) -> Family:
    for family in FAMILIES:
        if architecture in known(family):
            return family
    usual, all_names = ([name for family in FAMILIES for name in known(family)[:most]] for most in (1, None))
    names = list(dict.fromkeys([*usual, *all_names]))
    supported = f"{', '.join(names[:8])} and {len(names) - 8} more (docs/supported-models.md)"
    refused = f"architecture {shown(architecture)} is not supported{_reason(architecture)}"
    raise ModelError(f"{where}: {refused}; supported: {supported}")


def declared_family(raw: Mapping[str, Any], text: Mapping[str, Any] | None, where: str) -> Family:
    """`text`: the part that is the language model, where there is such a part."""
    architectures = raw.get("architectures")
    if not architectures:
        return family_of_type(raw.get("model_type"), (raw if text is None else text).get("model_type"), where)
    if not isinstance(architectures, list):
        raise ModelError(f"{where}: architectures must be a list, got {shown(architectures)}")
    if architectures[0] in WITH_MORE:
        return family_inside(architectures[0], raw if text is None else text, where)
    return family_of(_with_head(architectures[0]), lambda each: each.architectures, where)


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
