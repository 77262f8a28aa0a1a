"""The sampling defaults that a model brings: generation_config.json, GGUF metadata, its model card, or llama.cpp's.

A request that gives a field of its own overrides that field. `--generation-config vllm` turns all of this off.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.config import ModelOptions
from ridgeline.errors import BadRequest, ConfigError, ModelError
from ridgeline.model_files import read_json
from ridgeline.models.gguf import GGUFFile
from ridgeline.sampling_params import SamplingParams

# generation_config.json's names -> ours
_GENERATION_CONFIG = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")}
_GENERATION_CONFIG["max_new_tokens"] = "max_tokens"
# GGUF's names -> ours
_GGUF = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
# A GGUF file without sampling metadata gets what its model card recommends, by general.basename …
_CARDS: dict[str, dict[str, Any]] = {"smollm2": {"temperature": 0.2, "top_p": 0.9}}
# … or what llama.cpp would use: raw sampling at temperature 1.0 makes small models talk nonsense.
LLAMA_CPP: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
NEUTRAL = "vllm"                     # of --generation-config: vLLM's name for "none"


@dataclass(frozen=True)
class SamplingDefaults(Mapping[str, Any]):
    """Fields of SamplingParams, and where they come from."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    source: str = "none"

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __str__(self) -> str:
        if not self:
            return f"temperature 1.0 ({'the model brings no defaults' if self.source == 'none' else self.source})"
        values = ", ".join(f"{name} {value:g}" for name, value in self.items())
        return f"{values} ({self.source})"


def load_sampling_defaults(options: ModelOptions, model: Path) -> SamplingDefaults:
    """By --generation-config and --override-generation-config; checked."""
    asked = options.generation_config
    if asked == NEUTRAL:
        found = SamplingDefaults({}, "--generation-config vllm")
    elif asked != "auto":
        found = _of_file(_file_of(Path(asked)))
    elif model.suffix == ".gguf":
        found = _of_gguf(model)
    else:
        file = model / "generation_config.json"
        found = _of_file(file) if file.is_file() else SamplingDefaults()
    if not options.override_generation_config:
        return found
    fields = {**found, **_overrides(options.override_generation_config)}
    source = "--override-generation-config" if found.source == "none" else f"{found.source}, with overrides"
    return SamplingDefaults(fields, source)


def _file_of(path: Path) -> Path:
    file = path / "generation_config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"generation_config must be auto, vllm, or a directory with generation_config.json; got {str(path)!r}")
    return file


def _of_file(file: Path) -> SamplingDefaults:
    return SamplingDefaults(_checked(read_json(file), _GENERATION_CONFIG, str(file)), "generation_config.json")


def _of_gguf(model: Path) -> SamplingDefaults:
    with GGUFFile(model) as file:
        metadata = file.metadata
    written = {name: metadata.get(f"general.sampling.{name}") for name in _GGUF}
    if any(value is not None for value in written.values()):
        # llama.cpp fills in what the file leaves out.
        return SamplingDefaults(LLAMA_CPP | _checked(written, _GGUF, str(model)), "the GGUF file")
    basename = str(metadata.get("general.basename", "")).lower()
    if basename in _CARDS:
        return SamplingDefaults(_CARDS[basename], "the model's card")
    return SamplingDefaults(LLAMA_CPP, "llama.cpp's: the GGUF file has none")


def _overrides(text: str) -> dict[str, Any]:
    name = "override_generation_config"
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{name} must be a JSON object, got {text[:80]!r}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{name} must be a JSON object, got {text[:80]!r}")
    known = _GENERATION_CONFIG | {ours: ours for ours in _GENERATION_CONFIG.values()}
    unknown = sorted(given.keys() - known.keys())
    if unknown:
        raise ConfigError(f"{name} has no field {unknown[0]!r}; it takes {', '.join(sorted(known))}")
    try:
        return _checked(given, known, name)
    except ModelError as error:
        raise ConfigError(str(error)) from None


def _checked(written: Mapping[str, Any], names: Mapping[str, str], where: str) -> dict[str, Any]:
    """The known fields by our names; ModelError where SamplingParams would refuse one."""
    given = {ours: written[name] for name, ours in names.items() if written.get(name) is not None}
    try:
        SamplingParams(**given)
    except BadRequest as error:
        raise ModelError(f"{where}: {error}") from None
    return given
