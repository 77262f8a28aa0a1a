"""LLM: offline generation in this process. The class follows vLLM's in shape, so that an import is all to change."""

from __future__ import annotations

import dataclasses
import gc
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from ridgeline.config import EngineConfig
from ridgeline.engine.client.outputs import EmbeddingOutput, PoolingRequestOutput, RequestOutput, ScoringOutput
from ridgeline.engine.client.processor import ROLES, Processor, Prompt, RequestState, second_begins
from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.core.gc_policy import only_the_young
from ridgeline.errors import BadRequest, EngineDead, RequestError, Unsupported, shown
from ridgeline.known_options.python_names import METHODS, require_neutral
from ridgeline.messages import Request, TokenDelta, TokenDeltas
from ridgeline.models.model_config import load_model_config
from ridgeline.process.progress import Tick, progress_bar
from ridgeline.resolve import model_path
from ridgeline.sampling_params import SamplingParams
from ridgeline.text.tokenizer import Tokenizer

SAMPLING_NAMES = frozenset(each.name for each in dataclasses.fields(SamplingParams))


class LLM:
    """A model ready to answer. `LLM()` is the embedded model; options are those of `ridgeline.config`."""

    def __init__(self, model: str | Path | None = None, *, use_tqdm_on_load: bool = True, **options: Any) -> None:
        """`use_tqdm_on_load` shows a bar while weights load, on a terminal."""
        # Offline, no client waits for the next token: prompts may take whole steps.
        config = EngineConfig.of(model=model, **{"step_time_ms": 0.0} | options).for_one_engine()
        path = model_path(config)
        load_model_config(path)                          # fails with the model's own error, before the tokenizer's
        self._processor = Processor.load(config.model, path, config.execution.speculative_config)
        with progress_bar("loading weights", in_bytes=True, wanted=use_tqdm_on_load) as tick:
            self.core = EngineCore.start(config, progress=tick)

    def get_tokenizer(self) -> Tokenizer:
        if self._processor.tokenizer is None:
            raise BadRequest("there is no tokenizer: skip_tokenizer_init is set")
        return self._processor.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults (engine/client/sampling_defaults.py); used where no SamplingParams are given."""
        return self._processor.default_params()

    def reset_prefix_cache(self) -> bool:
        """Forget every computed prefix. False, and nothing is forgotten, while requests hold part of the KV cache."""
        return self.core.scheduler.manager.forget_prefixes()

    @only_the_young()
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answers to all prompts, in order. Those that may become longest begin first; where all lengths are known (ignore_eos),
        short ones may be kept to run beside them (sizes/batch_levelling.py). `priority` comes before that.

        A prompt that cannot run fails the call before anything is computed. An answer that fails on the way ends with
        finish_reason "error" and says why in stop_reason; the others go on. Ctrl-C waits for the running step, so that
        the engine stays whole; a second one does not wait.
        """
        require_neutral("generate", others, SAMPLING_NAMES)
        _require_no_adapter(lora_request)
        listed = _as_list(prompts)
        params = _one_each("sampling_params", sampling_params, SamplingParams, self.get_default_sampling_params(), listed)
        as_now = {id(each): each.clone() for each in params}             # checked again: callers change fields
        params = [as_now[id(each)] for each in params]
        priorities = _one_each("priority", priority, int, 0, listed)
        return self._run(self._processor.requests(listed, params, priorities), use_tqdm)

    @only_the_young()
    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        chat_template: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """The next message of one conversation, or of each of several."""
        require_neutral("chat", others, SAMPLING_NAMES)
        several = isinstance(messages, list) and messages and isinstance(messages[0], list)
        conversations: list[Any] = messages if several else [messages]
        for conversation in conversations:
            _check_roles(conversation)
        template: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
        }
        prompts = [{"prompt_token_ids": each} for each in self._processor.chat_prompts(conversations, **template)]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, pooling: str = "last", normalize: bool = True, use_tqdm: bool = True,
        lora_request: None = None, **others: Any
    ) -> list[PoolingRequestOutput]:
        """Each prompt as a vector: the hidden state of its last token, or the mean of all, with length 1."""
        require_neutral("embed", others)
        _require_no_adapter(lora_request)
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True, pooling=pooling)
        made = []
        for output in self.generate(prompts, params, use_tqdm=use_tqdm):
            assert output.hidden is not None
            vector = output.hidden.astype(np.float32)
            length = float(np.linalg.norm(vector)) if normalize else 0.0
            embedding = EmbeddingOutput((vector / length if length > 0 else vector).tolist())
            made.append(PoolingRequestOutput(output.request_id, embedding, output.prompt_token_ids))
        return made

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], *, use_tqdm: bool = True, lora_request: None = None,
        **others: Any
    ) -> list[PoolingRequestOutput]:
        """How likely each second text is after its first one. One first text goes with several second ones."""
        require_neutral("score", others)
        _require_no_adapter(lora_request)
        firsts, seconds = ([each] if isinstance(each, str) else list(each) for each in (data_1, data_2))
        if not firsts or not seconds or (len(firsts) != len(seconds) and len(firsts) != 1):
            raise BadRequest(f"score needs equally many texts, or one first text; got {len(firsts)} and {len(seconds)}")
        tokenizer = self.get_tokenizer()
        pairs = list(zip(firsts * len(seconds) if len(firsts) == 1 else firsts, seconds, strict=True))
        both = [tokenizer.encode(first + second) for first, second in pairs]
        begins = [second_begins(tokenizer.encode(first), whole) for (first, _), whole in zip(pairs, both, strict=True)]
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True, prompt_logprobs=0)
        outputs = self.generate([{"prompt_token_ids": whole} for whole in both], params, use_tqdm=use_tqdm)
        return [_scored(output, begin) for output, begin in zip(outputs, begins, strict=True)]

    def __getattr__(self, name: str) -> Any:
        """Methods of vLLM's class that are not here say what to use instead."""
        if name in METHODS:
            raise AttributeError(f"LLM has no {name}: {METHODS[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _run(self, made: list[tuple[Request, RequestState]], show: bool) -> list[RequestOutput]:
        states = {request.request_id: state for request, state in made}
        with progress_bar("answers", wanted=show) as tick, _BetweenSteps() as interrupt:
            try:
                for request, _ in made:
                    self.core.add(request)
                self.core.scheduler.begin_with_longest()
                self._drain(states, tick, interrupt.deliver)
            except BaseException:
                for request_id in states:                # leave nothing behind that would run with the next call
                    self.core.abort(request_id)
                raise
        for _, state in made:
            _make_lists(state.output)
        return [state.output for _, state in made]

    def _drain(
        self, states: dict[str, RequestState], tick: Tick, after_step: Callable[[], None] = lambda: None
    ) -> None:
        done = 0
        while self.core.has_work:
            for delta in self._news(self.core.step(), states):
                state = states.get(delta.request_id)
                if state is None or state.output.outputs[delta.index].finished():
                    continue                             # news of an answer that a stop string has ended
                try:
                    _, stop_here = state.take(delta)
                except RequestError:
                    stop_here = False                    # noted in the output; it concerns this answer alone
                if stop_here:
                    self.core.abort(delta.request_id, delta.index)
                if state.output.finished:
                    done += 1
                    tick(done, len(states))
            after_step()

    @staticmethod
    def _news(deltas: TokenDeltas, states: dict[str, RequestState]) -> Iterator[TokenDelta]:
        """Those that may end an answer. The others, nearly all, are taken here, in less than half the time."""
        for (request_id, index, num_cached), token_ids in deltas.plain():
            state = states.get(request_id)
            if state is not None and state.is_plain and state.output.outputs[index].finish_reason is None:
                state.keep(index, token_ids, num_cached)
            else:
                yield TokenDelta(request_id, index, token_ids, num_cached_tokens=num_cached)
        yield from deltas.others

    def close(self) -> None:
        """Frees the memory of weights and KV cache; calls afterwards fail."""
        if self._processor.grammars is not None:
            self._processor.grammars.close()
        self.core.close()
        self.core = _Closed()  # type: ignore[assignment]
        gc.collect()                                     # parts of an engine refer to each other
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Closed:
    """In place of a closed engine."""

    def close(self) -> None:
        """Again."""

    def __getattr__(self, name: str) -> Any:
        raise EngineDead("this LLM was closed; make a new one")


class _BetweenSteps:
    """Holds Ctrl-C back until `deliver` is called: inside a step it would leave the engine's two halves at odds.

    Only in the main thread, where Python handles signals, and only where something in Python handles this one.
    """

    def __init__(self) -> None:
        self._pending = False
        self._handler: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> _BetweenSteps:
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self.deliver()

    def deliver(self) -> None:
        if self._pending and self._handler is not None:
            self._pending = False
            self._handler(signal.SIGINT, None)           # usually it raises KeyboardInterrupt

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._pending and self._handler is not None:
            self._handler(number, frame)
        self._pending = True


def _as_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise BadRequest(f"prompts must be a prompt or a list of prompts, got {shown(prompts)}")
    listed: list[Any] = list(prompts)
    return [listed] if listed and isinstance(listed[0], Integral) else listed


def _one_each(name: str, given: Any, kind: type, default: Any, prompts: list[Prompt]) -> list[Any]:
    """One value for all prompts, or a list with one each."""
    if given is None or isinstance(given, kind):
        return [default if given is None else given] * len(prompts)
    if not isinstance(given, Sequence) or not all(isinstance(each, kind) for each in given):
        raise BadRequest(f"{name} must be {kind.__name__}, one for all prompts or a list of one each; got {shown(given)}")
    if len(given) != len(prompts):
        raise BadRequest(f"{name} has {len(given)} entries for {len(prompts)} prompts; give one, or one each")
    return list(given)


def _make_lists(output: RequestOutput) -> None:
    """Log-probabilities as vLLM has them, which callers change, or give to json; a server makes positions when they are read."""
    if output.prompt_logprobs is not None:
        output.prompt_logprobs = list(output.prompt_logprobs)
    for answer in output.outputs:
        if answer.logprobs is not None:
            answer.logprobs = list(answer.logprobs)  # type: ignore[assignment]


def _scored(output: RequestOutput, begin: int) -> PoolingRequestOutput:
    assert output.prompt_logprobs is not None
    at = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[begin:]
    found = [known[token].logprob for token, known in at if known is not None]
    return PoolingRequestOutput(output.request_id, ScoringOutput(sum(found), len(found)), output.prompt_token_ids)


def _check_roles(conversation: Any) -> None:
    """As the server does: a misspelt role would only make the answer worse."""
    for place, message in enumerate(conversation if isinstance(conversation, list) else []):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES:
            raise BadRequest(f"messages[{place}].role must be one of {', '.join(ROLES)}; got {shown(role)}", field="messages")


def _require_no_adapter(lora_request: Any) -> None:
    if lora_request is not None:
        raise Unsupported("lora_request is not supported; merge the adapter into the weights first")
