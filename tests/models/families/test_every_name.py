"""Every name that transformers and llama.cpp have for a model that answers: it loads, or it is refused for a reason that is told.
A new version of either with new names fails here: they are to be looked at."""

from __future__ import annotations

import gguf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ridgeline.errors import ModelError
from ridgeline.models.families.all_families import FAMILIES, WITH_MORE, family_of

# Attention and MLPs alone, or nearly: a declaration away.
UNDECLARED = {
    "AXK1ForCausalLM", "AriaTextForCausalLM", "BioGptForCausalLM", "Cohere2MoeForCausalLM", "CohereCompassForCausalLM",
    "DbrxForCausalLM", "GPTNeoXJapaneseForCausalLM", "GraniteMoeSWAForCausalLM", "GraniteSWAForCausalLM",
    "Kolibri1ForCausalLM", "NanoChatForCausalLM", "XLMWithLMHeadModel",
    # Of GGUF.
    "arctic", "bailingmoe", "bailingmoe2", "codeshell", "dbrx", "deepseek", "deepseek2-ocr", "grok", "grovemoe", "hunyuan_vl",
    "maincoder", "orion", "paddleocr", "pangu-embedded", "plamo", "plamo3", "plm", "qwen", "smallthinker", "step35", "xverse",
}


def refusal(name: str) -> str:
    try:
        family_of(name, lambda family: (*family.architectures, *((family.gguf, *family.gguf_also) if family.gguf else ())), "x")
    except ModelError as error:
        return str(error)
    return ""


def test_every_name_loads_or_is_refused_for_a_reason() -> None:
    listed = [[names] if isinstance(names, str) else names for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()]
    names = {*(name for each in listed for name in each), *gguf.MODEL_ARCH_NAMES.values()} - set(WITH_MORE)
    without = {name for name in names if "(no family is declared for it)" in refusal(name)}
    assert without == UNDECLARED & names and not UNDECLARED - names
    assert all("is not supported (" in message for name in names if (message := refusal(name)))


def test_names_that_newer_transformers_have_are_refused_for_a_reason() -> None:
    reasons = {"Lfm3": "short convolutions", "Dots3Note": "sparse attention", "IQuestLoopCoder": "layers that run several times"}
    assert [name for name, reason in reasons.items() if reason not in refusal(f"{name}ForCausalLM")] == []


def test_a_name_of_megabytes_is_not_looked_for() -> None:
    """Each family's look at 60 MB took a second, and there are eighty."""
    assert " is not supported; supported: " in refusal("Mamba" * 1_000)


def test_every_gguf_name_of_ours_is_llama_cpps() -> None:
    ours = {name for family in FAMILIES for name in (family.gguf, *family.gguf_also) if name}
    assert ours <= set(gguf.MODEL_ARCH_NAMES.values())


def test_tensors_of_gguf_files_have_llama_cpps_names() -> None:
    """Of each architecture, our names are among those that the gguf package lists for it."""
    by_name = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    for family in FAMILIES:
        for name in (family.gguf, *family.gguf_also) if family.gguf else ():
            listed = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[by_name[name]]}
            ours = {each.replace("{}", "{bid}") for each in family.gguf_names}
            assert {each.removesuffix(".weight") for each in listed} & ours, name
            missing = {each for each in listed - ours if not each.startswith(("rope", "v.", "mm.", "cls", "a."))}
            assert not REQUIRED & missing, (name, missing)


# Tensors that every file with the architecture has, if the package lists them for it: each must have a place.
REQUIRED = {gguf.TENSOR_NAMES[kind] for kind in (
    gguf.MODEL_TENSOR.TOKEN_EMBD, gguf.MODEL_TENSOR.OUTPUT_NORM, gguf.MODEL_TENSOR.OUTPUT, gguf.MODEL_TENSOR.FFN_DOWN,
    gguf.MODEL_TENSOR.FFN_UP, gguf.MODEL_TENSOR.ATTN_OUT, gguf.MODEL_TENSOR.ATTN_POST_NORM, gguf.MODEL_TENSOR.FFN_POST_NORM,
    gguf.MODEL_TENSOR.ATTN_SINKS, gguf.MODEL_TENSOR.POS_EMBD,
)}
