"""The unfinished answers of every request, by request id; a new request is checked and becomes sequences here."""

from __future__ import annotations

from ridgeline.errors import PROMPT, BadRequest
from ridgeline.messages import Request
from ridgeline.scheduler.sequence import Sequence, Turn


class LiveRequests:
    def __init__(self, eos_token_ids: frozenset[int], use_priorities: bool, seed: int) -> None:
        self._eos = eos_token_ids
        self._use_priorities = use_priorities
        self._seed = seed
        self.num_arrived = 0
        self._sequences: dict[str, list[Sequence]] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def of(self, request_id: str) -> list[Sequence]:
        return self._sequences.get(request_id, [])

    def same(self, request: Request) -> list[Sequence]:
        """Of this request, and not of a later one with its id."""
        return [sequence for sequence in self.of(request.request_id) if sequence.request is request]

    def add(self, request: Request, max_model_len: int, step: int) -> list[Sequence]:
        """A sequence for each answer. The client has checked the request; only what this engine cannot run is refused."""
        params, num_prompt = request.params, len(request.prompt_token_ids)
        if request.request_id in self._sequences:
            raise BadRequest(f"request id {request.request_id!r} is already running")
        if num_prompt == 0:
            raise BadRequest("the prompt is empty; it needs at least one token", field=PROMPT)
        if num_prompt >= max_model_len:
            raise BadRequest(
                f"the prompt has {num_prompt} tokens, which leaves no room for an answer: max_model_len is {max_model_len}",
                field=PROMPT,
            )
        limit = max_model_len if params.max_tokens is None else min(max_model_len, num_prompt + params.max_tokens)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        resumed = request.resumed
        if resumed is not None and not _can_resume(resumed, params.n, limit - num_prompt):
            raise BadRequest("resumed must hold unfinished answers of this request, at least one")
        sequences: list[Sequence] = []
        for index in range(params.n):
            self.num_arrived += 1
            if resumed is not None and index not in resumed:
                continue                                         # it had ended
            turn = Turn(request.priority if self._use_priorities else 0, self.num_arrived, step)
            sequence = Sequence(request, index, turn, limit, self._noise_key(request, index), stop_ids)
            if resumed is not None:
                _resume(sequence, resumed[index], any(resumed.values()) or 0 not in resumed)
            sequence.leader = sequences[0] if sequences else None
            sequences.append(sequence)
        self._sequences[request.request_id] = sequences
        return sequences

    def remove(self, sequence: Sequence) -> None:
        live = self._sequences[sequence.request.request_id]
        live.remove(sequence)
        if not live:
            del self._sequences[sequence.request.request_id]

    def _noise_key(self, request: Request, index: int) -> int:
        """Equal seeds give equal noise; the n answers of one request differ; without a seed every request differs."""
        seed = request.params.seed
        base = seed if seed is not None else self._seed * 0x9E3779B97F4A7C15 + self.num_arrived * 0xD1B54A32D192ED03
        return (base + index * 0xBF58476D1CE4E5B9) % 2**64


def _resume(sequence: Sequence, produced: list[int], begun: bool) -> None:
    """It goes on where an earlier engine stopped, as after a preemption: its known tokens are computed again."""
    sequence.tokens.extend(produced)
    sequence.prefill.lost_tokens = len(sequence.tokens) - 1 if begun else 0
    sequence.prefill.logprobs_sent = begun                   # they came with the first token


def _can_resume(resumed: dict[int, list[int]], n: int, most: int) -> bool:
    return bool(resumed) and all(0 <= index < n and len(produced) < most for index, produced in resumed.items())
