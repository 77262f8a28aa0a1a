"""Ridgeline: an LLM inference engine that knows its roofline.

Public names are loaded when first used, so that `import ridgeline` costs nothing.
"""

from __future__ import annotations

from ridgeline.interrupt import guard_imports

guard_imports()

import importlib  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from ridgeline.process import platform  # noqa: E402
from ridgeline.version import __version__  # noqa: E402

if TYPE_CHECKING:
    from ridgeline.engine.client.async_llm import AsyncLLM
    from ridgeline.engine.client.outputs import CompletionOutput, RequestOutput
    from ridgeline.engine.client.processor import TextPrompt, TokensPrompt
    from ridgeline.engine.llm import LLM
    from ridgeline.sampling_params import SamplingParams, StructuredOutputsParams

platform.wait_briefly()              # both before any module imports torch
platform.quiet_torch()

_PUBLIC = {
    "LLM": "ridgeline.engine.llm",
    "AsyncLLM": "ridgeline.engine.client.async_llm",
    "SamplingParams": "ridgeline.sampling_params",
    "StructuredOutputsParams": "ridgeline.sampling_params",
    "RequestOutput": "ridgeline.engine.client.outputs",
    "CompletionOutput": "ridgeline.engine.client.outputs",
    "TextPrompt": "ridgeline.engine.client.processor",
    "TokensPrompt": "ridgeline.engine.client.processor",
}

__all__ = [
    "LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "TextPrompt",
    "TokensPrompt", "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        if name[:1].isupper() and (instead := importlib.import_module("ridgeline.known_options.python_names").CLASSES.get(name)):
            raise ImportError(f"ridgeline has no {name}: {instead}")     # the reason of an AttributeError would not be shown
        raise AttributeError(f"module 'ridgeline' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    """For a shell that completes names: the public ones, which are not loaded yet."""
    return sorted({*__all__, *globals()} - {"Any", "TYPE_CHECKING", "annotations", "guard_imports", "importlib"})
