"""The runner obeys plans: submit() launches the forward pass, sample() picks tokens, collect() brings them to the host.

Forward and sampling are two calls, so that masks for step N can be made from token N-1 while forward N runs. Several
steps may be between submit and collect. The runner knows rows, never requests.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ridgeline.distributed.comm import Communicator
from ridgeline.messages import Logprobs, StepPlan, StepResult, Want
from ridgeline.models.decoder import Decoder
from ridgeline.ops.logits import logprobs as token_logprobs
from ridgeline.runner.forward import Forward
from ridgeline.runner.kv_buffers import KVBuffers
from ridgeline.runner.rows import DeviceRows
from ridgeline.runner.sampler import Sampled, Sampler

_PROMPT_LOGPROB_ROWS = 256           # prompt positions whose logits exist at once: bounds the scratch


@dataclass(slots=True)
class _Step:
    """A step between submit and collect."""

    plan: StepPlan
    lengths: np.ndarray              # tokens of each row in the cache once the step is done
    places: np.ndarray               # places in the batch that sample
    logits: Tensor | None            # [S, vocab], until they are sampled from
    prompt_logprobs: dict[int, Logprobs]
    started: float
    sampled: Sampled | None = None
    logprobs: dict[int, Logprobs] | None = None


class Runner:
    def __init__(
        self,
        model: Decoder,
        forward: Forward,
        rows: DeviceRows,
        sampler: Sampler,
        buffers: KVBuffers,
        comm: Communicator,
    ) -> None:
        self.model = model
        self._forward = forward
        self._rows = rows
        self._sampler = sampler
        self._buffers = buffers
        self._comm = comm
        self._steps: deque[_Step] = deque()
        self._num_logprobs: dict[int, int] = {}          # row -> alternatives wanted per sampled token
        self._num_prompt_logprobs: dict[int, int] = {}

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        started = time.perf_counter()
        self._apply(plan)
        starts = self._rows.length[plan.rows]
        batch = self._rows.pack(plan)
        hidden = self._forward.run(batch)
        places = np.nonzero(plan.want & np.int8(Want.TOKEN))[0]
        logits = self.model.logits(hidden[batch.logits_index]) if len(places) else None
        lengths = self._rows.length[plan.rows].astype(np.int32)
        prompt_logprobs = self._prompt_logprobs(plan, starts, hidden)
        self._steps.append(_Step(plan, lengths, places, logits, prompt_logprobs, started))

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.removed.tolist():
            self._sampler.remove_row(row)
            self._num_logprobs.pop(row, None)
            self._num_prompt_logprobs.pop(row, None)
        for added in plan.added:
            self._sampler.add_row(added.row, added)
            if added.params.logprobs is not None:
                self._num_logprobs[added.row] = added.params.logprobs
            if added.params.prompt_logprobs is not None:
                self._num_prompt_logprobs[added.row] = added.params.prompt_logprobs
        self._rows.apply(plan)
        self._buffers.run(plan.block_ops)

    def _prompt_logprobs(self, plan: StepPlan, starts: np.ndarray, hidden: Tensor) -> dict[int, Logprobs]:
        """Position p says how likely prompt token p + 1 was; the last prompt position belongs to the answer."""
        found: dict[int, Logprobs] = {}
        first = np.cumsum(plan.num_tokens) - plan.num_tokens
        for place in np.nonzero(plan.want & np.int8(Want.PROMPT_LOGPROBS))[0].tolist():
            row, start = int(plan.rows[place]), int(starts[place])
            end = min(start + int(plan.num_tokens[place]), int(self._rows.num_prompt[row]) - 1)
            if end <= start:
                continue
            targets = torch.from_numpy(self._rows.given[row][start + 1 : end + 1].astype(np.int64)).to(hidden.device)
            states = hidden[int(first[place]) : int(first[place]) + end - start]
            chunks = [
                token_logprobs(self.model.logits(part), wanted, self._num_prompt_logprobs[row])
                for part, wanted in zip(
                    states.split(_PROMPT_LOGPROB_ROWS), targets.split(_PROMPT_LOGPROB_ROWS), strict=True
                )
            ]
            found[place] = _to_host(targets, [torch.cat(parts) for parts in zip(*chunks, strict=True)])
        return found

    @torch.inference_mode()
    def sample(self, masks: Tensor | None = None) -> None:
        """Sample the newest submitted step. Rank 0 decides; everybody learns the tokens."""
        step = self._steps[-1]
        if step.logits is None:
            return
        rows = step.plan.rows[step.places]
        step.sampled = self._sampler.sample(step.logits, rows, masks)
        tokens = self._comm.broadcast(step.sampled.tokens)
        self._rows.last_token[torch.from_numpy(rows.astype(np.int64)).to(tokens.device)] = tokens
        step.logprobs = self._logprobs(step, rows, tokens)
        step.logits = None

    def _logprobs(self, step: _Step, rows: np.ndarray, tokens: Tensor) -> dict[int, Logprobs]:
        """For the rows that asked, all at once, with as many alternatives as the greediest of them wants."""
        asked = [place for place, row in enumerate(rows.tolist()) if row in self._num_logprobs]
        if not asked or step.logits is None:
            return {}
        most = max(self._num_logprobs[int(rows[place])] for place in asked)
        chosen = tokens[asked]
        whole = _to_host(chosen, list(token_logprobs(step.logits[asked], chosen, most)))
        found = {}
        for index, place in enumerate(asked):
            count = self._num_logprobs[int(rows[place])]
            one = slice(index, index + 1)
            found[int(step.places[place])] = Logprobs(
                whole.token_ids[one], whole.logprobs[one], whole.ranks[one],
                whole.top_ids[one, :count], whole.top_logprobs[one, :count],
            )  # fmt: skip
        return found

    def collect(self) -> StepResult:
        """The oldest step's result."""
        step = self._steps.popleft()
        plan = step.plan
        tokens = np.full((len(plan.rows), 1), -1, np.int32)
        failed: dict[int, str] = {}
        if step.sampled is not None:
            tokens[step.places, 0] = step.sampled.tokens.cpu().numpy()
            broken = step.places[step.sampled.failed.cpu().numpy()]
            failed = dict.fromkeys(broken.tolist(), "the model produced no finite logits for this request")
        num_new = np.zeros(len(plan.rows), np.int32)
        num_new[step.places] = 1
        return StepResult(
            step=plan.step,
            tokens=tokens,
            num_new=num_new,
            lengths=step.lengths,
            logprobs=step.logprobs or {},
            prompt_logprobs=step.prompt_logprobs,
            failed=failed,
            useful=plan.total_tokens - plan.recomputed,
            recomputed=plan.recomputed,
            device_seconds=time.perf_counter() - step.started,
        )


def _to_host(tokens: Tensor, parts: list[Tensor]) -> Logprobs:
    logprobs, ranks, top_ids, top_logprobs = (part.cpu().numpy() for part in parts)
    return Logprobs(
        tokens.cpu().numpy().astype(np.int32), logprobs.astype(np.float32), ranks.astype(np.int32),
        top_ids.astype(np.int32), top_logprobs.astype(np.float32),
    )  # fmt: skip
