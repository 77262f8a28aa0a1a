"""Whatever may take memory of a device, kind by kind, in the sizes that take most: full batches, full steps, every way to choose
a token, graphs of many shapes. For engines that hold a model of any size; answers are of no interest here."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.core.executor import LocalExecutor
from ridgeline.messages import Request
from ridgeline.runner.start import kernel_steps
from ridgeline.sampling_params import MAX_LOGPROBS, SamplingParams

DRAWN: dict[str, Any] = {"temperature": 0.8, "seed": 1}
CHOSEN: dict[str, dict[str, Any]] = {
    "drawn": DRAWN,
    "filters": DRAWN | {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "log-probabilities": {"logprobs": MAX_LOGPROBS},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "biased": DRAWN | {"logit_bias": {5: 1.0, 9: -1.0}, "min_tokens": 2},
    "allowed ids": {"allowed_token_ids": list(range(5, 25))},
    "everything": DRAWN | {"top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1, "logprobs": MAX_LOGPROBS, "min_tokens": 2},
}


class WorstCase:
    """`kinds` yields (name, what to run). Each is one that could need more than what came before it."""

    def __init__(self, core: EngineCore) -> None:
        self._core, self._rng, self._count = core, random.Random(5), 0
        self._most = core.config.max_num_seqs
        self._budget = core.config.max_num_batched_tokens
        self._longest = min(core.config.max_model_len - 64, 8000)

    def kinds(self) -> Iterator[tuple[str, Callable[[], None]]]:
        sizes = sorted({size for size in (2, 3, 8, 17, 33, 64, 100, 128, 140, 200, 256, 400, 512, 700) if size < self._most})
        yield "one prompt", lambda: self.ask([min(512, self._longest)], tokens=4)
        for size in sizes:
            yield f"{size} decodes", lambda size=size: self.ask([self._rng.randint(1, 8) for _ in range(size)], tokens=6)
        yield "a full batch", lambda: self.ask([4] * self._most, tokens=6)
        yield "full steps", self._full_steps
        yield "prompts beside decodes", self._beside_decodes
        for name, params in CHOSEN.items():
            for size in (3, self._most // 8 + 1, self._most - 1, self._most):
                yield f"{size} {name}", lambda size=size, params=params: self.ask([4] * size, tokens=4, **params)
        yield "scored prompts", lambda: self.ask(self._fill(8), tokens=2, prompt_logprobs=MAX_LOGPROBS)
        yield "embeddings", lambda: self.ask(self._fill(8), tokens=1, pooling="mean")
        for size in (1, self._most // 8 + 1, self._most - 1, self._most):
            for name in ("drawn", "filters", "everything"):
                yield f"{size} masked, {name}", lambda size=size, name=name: self._masked(size, CHOSEN[name])
        yield "a shared prefix", self._shared_prefix
        yield "graphs of all that was seen", self._record

    def ask(self, lengths: list[int], tokens: int, shared: int = 0, **params: Any) -> None:
        self._add(lengths, tokens, shared, **params)
        self._run()

    def _add(self, lengths: list[int], tokens: int, shared: int = 0, **params: Any) -> None:
        said = SamplingParams(**{"temperature": 0, "max_tokens": tokens, "ignore_eos": True} | params)
        for length in lengths:
            self._count += 1
            prompt = [7] * shared + [self._rng.randrange(3, 90) for _ in range(length)]
            self._core.add(Request(str(self._count), prompt, said))

    def _run(self, steps: int = 10**6) -> None:
        while self._core.has_work and steps:
            steps -= 1
            for delta in self._core.step():
                if delta.error:
                    raise AssertionError(delta.error)

    def _fill(self, count: int) -> list[int]:
        """Prompts that fill a step together."""
        return [min(self._longest, self._budget // count)] * count

    def _full_steps(self) -> None:
        """All rows sample in a step that is as large as it may be; prompts of thousands of tokens; and those between."""
        self.ask([self._budget // self._most] * self._most, tokens=2)
        self.ask([min(self._longest, self._budget)] * 2, tokens=2)
        for tokens in (self._budget // 2 - 1, self._budget // 3, self._budget // 5):
            self.ask([min(tokens, self._longest)], tokens=2)

    def _beside_decodes(self) -> None:
        for decodes in (3, self._most // 8, self._most // 2, self._most - 8):
            self._add([4] * decodes, 40)
            self._run(3)
            for length, count in ((30, 4), (100, 4), (200, 4), (500, 2), (1000, 2), (self._longest, 1)):
                self._add([min(length, self._longest)] * count, 2)
                self._run(4)
            self._run()

    def _masked(self, size: int, params: dict[str, Any]) -> None:
        """Past the scheduler: rows without blocks, whose masks allow everything."""
        runner = self._core.executor
        assert isinstance(runner, LocalExecutor) and not self._core.has_work
        said = SamplingParams(**params | {"structured_outputs": {"regex": "a"}, "min_tokens": 0})
        want = kernel_steps.Want.TOKEN | kernel_steps.Want.LOGPROBS if said.logprobs else kernel_steps.Want.TOKEN
        for _ in range(2):
            step = kernel_steps.KernelStep([1] * size, params=said, want=want, masked=True, used=True)
            kernel_steps.run_step(runner.runner, len(self._core.config.groups), step)

    def _shared_prefix(self) -> None:
        shared = min(2000, self._longest - 10)
        self.ask([3], tokens=1, shared=shared)
        for size in (30, self._most // 2):
            self.ask([3] * size, tokens=6, shared=shared)

    def _record(self) -> None:
        while self._core.prepare():
            pass
