"""The files beside the weights: config.json, generation_config.json and the tokenizer. Of a Hugging Face directory they are
copied; of a GGUF file they are written from its metadata."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Core
from tokenizers import decoders, processors

from ridgeline.config import ModelOptions
from ridgeline.engine.client.sampling_defaults import load_sampling_defaults
from ridgeline.errors import ModelError
from ridgeline.model_files import read_json, require_file
from ridgeline.models.gguf import GGUFFile
from ridgeline.models.model_config import ModelConfig
from ridgeline.models.rope import Rope
from ridgeline.text.vocabulary import SPACE_MARK, Vocabulary
from ridgeline.text.vocabulary_gguf import gguf_vocabulary

# Small files that say something about the model; weights and their index are written anew.
COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "tokenizer.model", "vocab.json", "merges.txt", "preprocessor_config.json",
    "processor_config.json", "LICENSE", "NOTICE",
)


def small_files(path: Path) -> list[str]:
    """Those that are copied, each of a bounded size. Looked at before the work, too: a hole of a terabyte would fill the disk."""
    named = [str(file.relative_to(path)) for file in path.glob("additional_chat_templates/*.jinja")]
    found = [name for name in (*COPIED, *named) if (path / name).is_file()]
    for name in found:
        require_file(path / name)
    return found


def write_small_files(path: Path, config: ModelConfig, quantization: dict[str, Any] | None, folder: Path) -> None:
    """`path`: of the input; `folder`: where the output is being made."""
    if path.suffix == ".gguf":
        with GGUFFile(path) as file:
            raw = gguf_config(config, file)
            vocabulary = gguf_vocabulary(file.metadata, path.name)
        _write_json(folder / "generation_config.json", _generation(path, config, vocabulary))
        write_tokenizer(vocabulary, folder)
    else:
        raw = read_json(path / "config.json")
        for name in small_files(path):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path / name, folder / name)
    _write_json(folder / "config.json", raw | ({} if quantization is None else {"quantization_config": quantization}))


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ── GGUF ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def gguf_config(config: ModelConfig, file: GGUFFile) -> dict[str, Any]:
    """config.json of a GGUF model. What this cannot say (scaled ropes of other kinds) is refused."""
    rope = config.ropes[0]
    scaled = set(rope.divisors)
    if len(set(config.ropes)) > 1 or len(scaled) > 1 or rope.scale != 1.0 or rope.long_divisors:
        raise ModelError(f"{file.path.name}: its rope scaling cannot be written to a config.json yet: give the model's directory")
    if any(window is not None for window in config.windows):
        raise ModelError(f"{file.path.name}: its attention windows cannot be written to a config.json yet: give its directory")
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    ends = list(config.eos_token_ids)
    return {
        "architectures": [config.family.architectures[0]], "model_type": config.family.name,
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim, "hidden_act": config.activation,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": float(f"{config.rms_norm_eps:.7g}"),             # GGUF holds it as a float32
        "rope_theta": rope.theta, "rope_scaling": _scaling(rope), "attention_bias": config.qkv_bias and config.output_bias,
        "mlp_bias": config.mlp_bias, "tie_word_embeddings": config.tied, "torch_dtype": config.dtype, "use_cache": True,
        "bos_token_id": bos if isinstance(bos, int) else None, "eos_token_id": ends if len(ends) != 1 else ends[0],
    }


def _scaling(rope: Rope) -> dict[str, Any] | None:
    return {"rope_type": "linear", "factor": rope.divisors[0]} if rope.divisors else None


def _generation(path: Path, config: ModelConfig, vocabulary: Vocabulary) -> dict[str, Any]:
    """With what the file itself is served with where a request gives nothing: at temperature 1 small models talk nonsense."""
    found = load_sampling_defaults(ModelOptions(), path)
    sampling = {"do_sample": True, **found} if found else {}
    return {"bos_token_id": vocabulary.bos_token_id, "eos_token_id": list(config.eos_token_ids), **sampling}


def write_tokenizer(vocabulary: Vocabulary, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json of a vocabulary that came from a GGUF file."""
    core = Core.from_str(vocabulary.core.to_str())
    sentencepiece = core.normalizer is not None
    if sentencepiece:
        steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
        core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if vocabulary.has_prefix_space else steps)
    else:
        core.decoder = decoders.ByteLevel()
    around = [[core.id_to_token(token) for token in ids] for ids in (vocabulary.prefix_ids, vocabulary.suffix_ids)]
    if any(around):
        core.post_processor = processors.TemplateProcessing(
            single=[*around[0], "$A", *around[1]], pair=[*around[0], "$A", *around[1], *around[0], "$B:1", *around[1]],
            special_tokens=[(core.id_to_token(each), each) for each in {*vocabulary.prefix_ids, *vocabulary.suffix_ids}],
        )
    (folder / "tokenizer.json").write_text(core.to_str(pretty=False), encoding="utf-8")
    templates = vocabulary.chat_templates
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **vocabulary.special_tokens,
    }
    if set(templates) == {"default"}:
        settings["chat_template"] = templates["default"]
    elif templates:
        settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    _write_json(folder / "tokenizer_config.json", settings)
