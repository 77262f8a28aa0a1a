"""Checks of a command's options that need no torch: a mistake is reported within a second, before an engine is started.

On a CPU that is everything that `resolve` checks. A GPU's memory and kernels are known to the engine's process alone.
"""

from __future__ import annotations

from ridgeline.config import EngineConfig
from ridgeline.draft_options import draft_options
from ridgeline.errors import ConfigError
from ridgeline.models.model_config import ModelConfig, load_model_config
from ridgeline.process import platform
from ridgeline.process.head_start import has_driver
from ridgeline.resolve import DeviceFacts, model_path, resolve


def cpu_facts() -> DeviceFacts:
    unusable = platform.cpu_unusable_dtypes()
    return DeviceFacts("cpu", platform.available_memory(), platform.cpu_fast_dtypes(), unusable=unusable)


def no_gpu(why: str) -> ConfigError:
    return ConfigError(f"device is cuda, but {why}; use device=cpu")


def checked_model(config: EngineConfig) -> ModelConfig:
    """The model's configuration; ConfigError for options that can be refused already."""
    draft_options(config.execution.speculative_config)
    model = load_model_config(model_path(config))        # a wrong model has its own error
    if config.model.device != "cpu" and has_driver():
        return model
    if config.model.device == "cuda":
        raise no_gpu("no NVIDIA driver was found here")             # torch was not asked
    return resolve(config, cpu_facts()).model
