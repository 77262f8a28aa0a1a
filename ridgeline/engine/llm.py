"""LLM: offline generation in this process. The class follows vLLM's in shape, so that an import is all to change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ridgeline.config import EngineConfig
from ridgeline.engine.core import EngineCore
from ridgeline.engine.frontend import Frontend, Prompt, RequestState
from ridgeline.engine.outputs import RequestOutput
from ridgeline.engine.tokenizer import Tokenizer
from ridgeline.errors import BadRequest
from ridgeline.messages import Request
from ridgeline.sampling_params import SamplingParams


class LLM:
    """A model ready to answer. `LLM()` is the embedded model; options are those of `ridgeline.config`."""

    def __init__(self, model: str | Path = "", *, use_tqdm: bool = False, **options: Any) -> None:
        """`use_tqdm` shows a bar while weights load."""
        config = EngineConfig.of(model=str(model), **options)
        with _bar("loading weights", use_tqdm, DownloadColumn()) as tick:
            self.core = EngineCore.start(config, progress=tick)
        self._frontend = Frontend.load(config.model, self.core.config.model_path)

    def get_tokenizer(self) -> Tokenizer:
        if self._frontend.tokenizer is None:
            raise BadRequest("there is no tokenizer: skip_tokenizer_init is set")
        return self._frontend.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answers to all prompts, in order. A prompt that cannot run fails the call before anything is computed."""
        listed = _as_list(prompts)
        params = _one_each(sampling_params or self.get_default_sampling_params(), len(listed))
        priorities = list(priority) if priority is not None else [0] * len(listed)
        if len(priorities) != len(listed):
            raise BadRequest(f"there are {len(listed)} prompts and {len(priorities)} priorities; give one each")
        made = [
            self._frontend.request(prompt, each, priority=urgency)
            for prompt, each, urgency in zip(listed, params, priorities, strict=True)
        ]
        return self._run(made, use_tqdm)

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The next message of one conversation, or of each of several."""
        conversations: list[Any] = messages if messages and isinstance(messages[0], list) else [messages]
        template = {
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        prompts = [{"prompt_token_ids": self._frontend.chat_tokens(each, **template)} for each in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _run(self, made: list[tuple[Request, RequestState]], show: bool) -> list[RequestOutput]:
        added: list[str] = []
        try:
            for request, _ in made:
                self.core.add(request)
                added.append(request.request_id)
            states = {request.request_id: state for request, state in made}
            with _bar("answers", show, MofNCompleteColumn()) as tick:
                self._drain(states, tick)
        except BaseException:
            for request_id in added:                     # leave nothing behind that would run with the next call
                self.core.abort(request_id)
            raise
        return [state.output for _, state in made]

    def _drain(self, states: dict[str, RequestState], tick: Callable[[int, int], None]) -> None:
        done = 0
        while self.core.has_work:
            for delta in self.core.step():
                state = states.get(delta.request_id)
                if state is None or state.output.outputs[delta.index].finished():
                    continue                             # news of an answer that a stop string has ended
                _, stop_here = state.take(delta)
                if stop_here:
                    self.core.abort(delta.request_id, delta.index)
                if state.output.finished:
                    done += 1
                    tick(done, len(states))

    def close(self) -> None:
        self.core.close()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, dict)):
        return [prompts]
    listed: list[Any] = list(prompts)
    return [listed] if listed and isinstance(listed[0], int) else listed


def _one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise BadRequest(f"there are {count} prompts and {len(params)} SamplingParams; give one, or one each")
    return list(params)


class _bar:
    """A progress bar as a callback (done, total), or nothing."""

    def __init__(self, label: str, show: bool, *columns: Any) -> None:
        self._progress = Progress(TextColumn(label), BarColumn(), *columns, TimeRemainingColumn(), disable=not show)

    def __enter__(self) -> Callable[[int, int], None]:
        self._progress.start()
        task = self._progress.add_task("", total=None)
        return lambda done, total: self._progress.update(task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
