"""What every choice repeats of its prompt, as JSON: written for the first of them, copied for the others.

With 128 answers to 8,000 tokens and their log-probabilities, to write it for each takes a minute. Knows outputs and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import msgspec

from ridgeline.engine.client.outputs import RequestOutput
from ridgeline.engine.token_logprobs import LogprobsAt

BYTES_PER_VALUE = 64                 # of JSON, for each log-probability
BYTES_PER_ID = 6                     # for each token id

LOWEST_LOGPROB = -9999.0             # JSON has no infinity

encode = msgspec.json.Encoder().encode
Part = TypeVar("Part")
T = TypeVar("T")


class PromptParts:
    """Of one prompt at a time: its choices come one after the other."""

    def __init__(self, has_logprobs: bool) -> None:
        """`has_logprobs`: the request asks for its prompts' log-probabilities."""
        self.has_logprobs = has_logprobs
        self._output: RequestOutput | None = None
        self._made: dict[str, Any] = {}

    def once(self, output: RequestOutput, name: str, make: Callable[[], T]) -> T:
        """The part called `name`, which is made if the last one was of another prompt."""
        if output is not self._output:
            self._output, self._made = output, {}
        if name not in self._made:
            self._made[name] = make()
        made: T = self._made[name]
        return made

    def forget(self) -> None:
        self._output, self._made = None, {}


def encoded_alone(part: Part) -> Part:
    """A part of a long answer, encoded already: the encoder takes the result for the part. One call for all parts would keep
    every other thread from running until it ends."""
    return cast("Part", msgspec.Raw(encode(part)))


def items_of(values: Iterable[Any]) -> bytes:
    """The items of a list as JSON, without its brackets; each is encoded alone."""
    return b",".join(map(encode, values))


def one_list(before: bytes, after: bytes) -> Any:
    """The items of two lists as one list, encoded already."""
    return msgspec.Raw(b"[%b%b%b]" % (before, b"," if before and after else b"", after))


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def num_prompt_logprobs(output: RequestOutput) -> int:
    """How many log-probabilities of its tokens a prompt has."""
    known = output.prompt_logprobs
    return 0 if known is None or len(known) < 2 else len(known) * len(known[1] or ())


def prompt_logprobs(output: RequestOutput) -> Any:
    """As vLLM writes them: per position a map from token id to its log-probability, rank and text. Encoded already."""
    if output.prompt_logprobs is None:
        return None

    def written(at: LogprobsAt) -> dict[str, Any]:
        return {
            str(token): {"logprob": finite(each.logprob), "rank": each.rank, "decoded_token": each.decoded_token}
            for token, each in at.items()
        }

    return one_list(items_of(None if at is None else written(at) for at in output.prompt_logprobs), b"")
