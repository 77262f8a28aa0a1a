"""How long a prompt and its answer may be, checked before any work, and which work is too long for the event loop.

Knows texts and counts; no tokenizer, no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from ridgeline.engine.client.processor import Prompt
from ridgeline.errors import PROMPT, BadRequest, PromptTooLong
from ridgeline.sampling_params import MAX_LOGPROBS, SamplingParams

LONG_WORK = 2_000                    # characters that take about a millisecond to tokenise: more would hold up the loop
USUAL_ANSWER = 32_768                # tokens that an answer without a limit of its own is expected to have at most
MOST_LOGPROBS = 3_000_000            # log-probabilities in the answers to a request: each is 8 bytes, and up to 100 when written
MOST_REPEATED = 16 * 2**20           # bytes that the prompts of a request repeat: each is sent with all parameters
MOST_TOKENS = 2**20                  # of all prompts of a request: to decode as many ids holds Python's lock for 50 ms
_ID_BYTES = 5                        # of a token id as it is sent, at most
MOST_VALUES = 200                    # texts, keys, lists and objects of a chat that is rendered on the event loop


@dataclass(frozen=True, slots=True)
class PromptLimits:
    max_model_len: int
    longest_piece: int               # bytes of the vocabulary's longest token; 0: there is no tokenizer

    def check(self, prompt: Prompt) -> None:
        """The engine checks lengths too; this spares it a frame of a million tokens."""
        given = _given(prompt)
        if isinstance(given, str):
            self.check_text(given)
        elif isinstance(given, Sized):
            self.check_length(len(given))

    def check_text(self, text: str) -> None:
        """No token is longer than the vocabulary's longest, so a text of more bytes than these can hold need not be tokenised."""
        most = self.max_model_len * self.longest_piece
        # Characters first: there are no more of them than bytes, and counting them is free.
        if most and (len(text) > most or len(text.encode("utf-8", "surrogatepass")) > most):
            message = f"the prompt is too long: more than {most} bytes of text, which cannot fit; {self._context}"
            raise PromptTooLong(message, field=PROMPT)

    def check_length(self, tokens: int) -> None:
        if tokens >= self.max_model_len:
            raise PromptTooLong(
                f"the prompt is too long: {tokens} tokens > {self.max_model_len - 1} maximum, which leaves one for the answer; "
                + self._context,
                field=PROMPT,
            )

    def check_answer(self, tokens: int, max_tokens: int | None, name: str) -> None:
        """Whether `max_tokens` fit after the prompt; `name`: the field that sets them."""
        if max_tokens is not None and tokens + max_tokens > self.max_model_len:
            raise PromptTooLong(
                f"{name} is too large: {max_tokens} tokens beside the {tokens} of the prompt; {self._context}; leave it out "
                f"for as many as there is room for ({self.max_model_len - tokens})",
                field=name,
            )

    def check_logprobs(self, prompts: Sequence[int], params: SamplingParams) -> None:
        """Whether the log-probabilities of all answers to `prompts` of so many tokens are few enough to be kept until they are
        written. Every answer is written with those of its prompt."""
        longest = USUAL_ANSWER if params.max_tokens is None else params.max_tokens
        values = 0
        if params.prompt_logprobs is not None:
            values += params.n * sum(prompts) * (1 + params.prompt_logprobs)
        if params.logprobs is not None:
            answers = sum(min(longest, self.max_model_len - tokens) for tokens in prompts)
            values += params.n * answers * (1 + max(params.logprobs, len(params.logprob_token_ids or ())))
        most = max(MOST_LOGPROBS, self.max_model_len * (1 + MAX_LOGPROBS))       # one answer may have all of them
        if values > most:
            raise BadRequest(
                f"up to {values:,} log-probabilities would be returned, and at most {most:,} can be; send fewer prompts, or ask "
                "for fewer answers (n), fewer tokens (max_tokens) or fewer alternatives",
                field="prompt_logprobs" if params.logprobs is None else "logprobs",
            )

    def check_repeated(self, frame: int, tokens: int, prompts: int) -> None:
        """Whether the parameters of a request are short enough to be sent with each of its prompts: 390,000 allowed_token_ids
        with 500 prompts were a gigabyte. `frame`: the bytes in which the first prompt, of `tokens`, is sent with them."""
        repeated = prompts * (frame - _ID_BYTES * tokens)
        if prompts > 1 and repeated > MOST_REPEATED:
            raise BadRequest(
                f"{prompts} prompts would repeat {repeated:,} bytes of parameters, and at most {MOST_REPEATED:,} can be sent; "
                "send fewer prompts, or less of allowed_token_ids, bad_words, stop strings, logit_bias or the grammar",
                field=PROMPT,
            )

    @property
    def _context(self) -> str:
        """In OpenAI's words, which clients search for; the words before it are Anthropic's, for the same reason."""
        return f"this model's maximum context length is {self.max_model_len} tokens (max_model_len)"


class PromptTally:
    """Counts the tokens of a request's prompts, and refuses more than it may have together. One prompt alone may fill the
    context."""

    def __init__(self, max_model_len: int) -> None:
        self.most = max(MOST_TOKENS, max_model_len)
        self._total = self._prompts = 0

    def add(self, tokens: int) -> None:
        self._total += tokens
        self._prompts += 1
        if self._prompts > 1 and self._total > self.most:
            raise BadRequest(
                f"the first {self._prompts} prompts have {self._total:,} tokens together, and at most {self.most:,} may come in "
                "one request; send them in several requests",
                field=PROMPT,
            )


def is_brief(*given: Any) -> bool:
    """Whether a conversation and all that its template gets (tools, variables) are too little to be worth a thread. Looks at no
    more than that."""
    left, values = LONG_WORK, MOST_VALUES
    stack = list(given)
    while stack:
        value = stack.pop()
        values -= 1
        if isinstance(value, str):
            left -= len(value)
        elif isinstance(value, Mapping):
            values -= len(value)                         # its keys
            left -= sum(map(len, value)) if values > 0 else 0
            stack += value.values() if values > 0 else ()
        elif isinstance(value, list | tuple):
            if len(value) < values:
                stack += value
            else:
                values = 0
        if left <= 0 or values <= 0:
            return False
    return True


def num_chars(given: Any) -> int:
    """About how many characters a conversation has as JSON, in linear time."""
    total, stack = 0, [given]
    while stack:
        value = stack.pop()
        total += 4
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, Mapping):
            stack += value
            stack += value.values()
        elif isinstance(value, list | tuple):
            stack += value
    return total


def amount_of_work(prompts: Sequence[Prompt], params: SamplingParams) -> int:
    """Of making these requests, in characters to tokenise: at LONG_WORK and above, not on the event loop."""
    given = sum(len(each) for each in map(_given, prompts) if isinstance(each, Sized))
    # Each prompt tokenises the bad words and prepares the stop strings; each answer searches for them.
    beside = sum(map(len, [*params.bad_words, *params.stop])) + params.n * (1 + len(params.stop))
    if isinstance(params.prediction, str):
        beside += len(params.prediction)
    # Each prompt is sent with all of them. An id takes a twentieth of the time of a character that is tokenised.
    ids = sum(len(each) for each in (params.allowed_token_ids, params.stop_token_ids, params.logit_bias) if each)
    beside += (ids + (len(params.structured_outputs.key) if params.structured_outputs is not None else 0)) // 20
    return given + len(prompts) * beside


def _given(prompt: Prompt) -> Any:
    """A prompt's text or token ids, of any type."""
    if not isinstance(prompt, Mapping):
        return prompt
    tokens = prompt.get("prompt_token_ids")
    return prompt.get("prompt") if tokens is None else tokens
