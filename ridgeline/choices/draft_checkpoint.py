"""The draft model of an engine: which checkpoint it is, where its KV lies, what it cannot work with. Reads no weights.

Its KV lies under the block ids of the model, so prefix cache, forks and preemption know nothing of it: every block has room for
the keys and values of all its layers, whatever group of the model the block belongs to. It uses the tables of a group that
forgets nothing. In layers with a window it keeps more than it needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ridgeline.config import EngineConfig
from ridgeline.draft_options import DRAFT_MODEL, draft_options
from ridgeline.errors import ConfigError, ModelError
from ridgeline.model_files import read_settings
from ridgeline.models.checkpoints.quantisation_check import check_quantization
from ridgeline.models.gguf import GGUFFile
from ridgeline.models.model_config import ModelConfig, kv_groups, load_model_config
from ridgeline.process.hub_cache import locate
from ridgeline.sizes.kv_format import KVFormat, cache_dtype
from ridgeline.sizes.kv_spec import KVGroupSpec, page_bytes

_DIFFERENT = 0.01                    # share of the tokens that may differ: models of a family name a few special ones differently
_OPTION = "speculative_config: a draft model"
_SAME = f"{_OPTION} must have the same vocabulary"


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    path: Path
    config: ModelConfig
    groups: list[KVGroupSpec]        # as its layers count them; the tables of all are the same
    pages: KVGroupSpec               # all its layers, each with a place of its own in every block
    format: KVFormat
    table: int                       # the model's group whose tables it uses

    @property
    def block_bytes(self) -> int:
        return page_bytes([self.pages], self.format)


def draft_checkpoint(
    config: EngineConfig, path: Path, model: ModelConfig, groups: list[KVGroupSpec], device: str, dtype: str
) -> DraftCheckpoint | None:
    """None: none is asked for. ConfigError for what cannot work. `path`, `model`, `groups`: of the model that it drafts for."""
    asked = draft_options(config.execution.speculative_config)
    if DRAFT_MODEL not in asked.methods:
        return None
    _check_options(config, device)
    full = [number for number, group in enumerate(groups) if group.window is None]
    if not full:
        raise ConfigError(f"{_OPTION} cannot work with this model: all its layers have a window, and blocks behind it are freed")
    where = locate(asked.model)
    found = load_model_config(where)
    if found.headless:
        raise ConfigError(f"{_OPTION} needs a head of a language model, and {where} has none: it gives vectors, not text")
    ranks = config.parallel.tensor_parallel_size
    check_quantization(found, "none", device, dtype, ranks, config.execution.deterministic, {})
    _check_vocabulary(Path(config.model.tokenizer) if config.model.tokenizer else path, model, where, found)
    own, pages = kv_groups(found, config.cache.block_size, ranks), draft_pages(found, config.cache.block_size, ranks)
    stored = cache_dtype("auto", dtype, device, config.model.kernels)
    return DraftCheckpoint(where, found, own, pages, KVFormat(stored, stored), full[0])


def draft_pages(draft: ModelConfig, block_size: int, ranks: int) -> KVGroupSpec:
    """What a block holds of a draft model: all its layers at once, whatever their windows."""
    return replace(kv_groups(draft, block_size, ranks)[0], layers=tuple(range(draft.num_layers)), window=None)


def _check_options(config: EngineConfig, device: str) -> None:
    parallel = config.parallel
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError(f"{_OPTION} does not work with pipeline_parallel_size {parallel.pipeline_parallel_size}; leave one out")
    if parallel.decode_context_parallel_size > 1:
        raise ConfigError(
            f"{_OPTION} does not work with decode_context_parallel_size {parallel.decode_context_parallel_size}; leave one out"
        )
    if config.execution.deterministic and device != "cpu":
        raise ConfigError(f"{_OPTION} does not work with deterministic on a GPU: no drafts are verified there; leave one out")


def _check_vocabulary(path: Path, model: ModelConfig, draft_path: Path, draft: ModelConfig) -> None:
    """Token by token where both have a tokenizer; else the sizes must be equal. Embeddings may be padded differently."""
    ours, theirs = _tokens(path), _tokens(draft_path)
    if not ours or not theirs:
        if model.vocab_size != draft.vocab_size:
            raise ConfigError(
                f"{_SAME}: {draft_path} has {draft.vocab_size} ids, the model has {model.vocab_size}"
            )
        return
    common = ours.keys() & theirs.keys()
    different = sum(ours[number] != theirs[number] for number in common)
    unknown = len(ours) + len(theirs) - 2 * len(common)
    if different + unknown > _DIFFERENT * len(ours):
        raise ConfigError(
            f"{_SAME}: {draft_path} differs from the model in {different} of {len(common)} tokens, and {unknown} are in one of "
            "the two only"
        )


def _tokens(path: Path) -> dict[int, str]:
    """Ids and texts of a checkpoint's tokens; none where it has no tokenizer.json. Ids that only fill up are left out."""
    if path.is_file() and path.suffix == ".gguf":
        with GGUFFile(path) as file:
            listed = file.metadata.get("tokenizer.ggml.tokens", [])
        if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
            raise ModelError(f"{path}: its tokens cannot be read")
        return {number: text for number, text in enumerate(listed) if not text.startswith("[PAD")}
    file_path = path / "tokenizer.json" if path.is_dir() else path
    if file_path.name != "tokenizer.json" or not file_path.is_file():
        return {}
    content = read_settings(file_path)
    try:
        vocabulary = content.get("model", {}).get("vocab", {})
        if not isinstance(vocabulary, dict):             # a list of texts and scores
            vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
        found = {int(number): str(text) for text, number in vocabulary.items()}
        return found | {int(each["id"]): str(each["content"]) for each in content.get("added_tokens") or []}
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
        raise ModelError(f"{file_path}: its tokens cannot be read") from None
