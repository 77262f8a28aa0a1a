"""`ridgeline generate INPUT.jsonl OUTPUT.jsonl`: answers to a file of prompts, in this process, without a server.

Lines are read as the engine has room for them and written as they finish, so files may be larger than memory. A line that
cannot be answered becomes a record with an `error`. Running the command again goes on where it stopped: what is already
in OUTPUT is not asked again. Both may be pipes (`/dev/stdin`, `/dev/stdout`): then nothing is counted or continued.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import count, takewhile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from ridgeline import interrupt
from ridgeline.cli.config_options import add_engine_options, engine_config
from ridgeline.cli.sampling_options import add_sampling_options, sampling_given
from ridgeline.cli.terminal import require_model
from ridgeline.early_check import checked_model
from ridgeline.engine.client.outputs import CompletionOutput, RequestOutput
from ridgeline.engine.client.processor import Processor, Prompt, RequestState
from ridgeline.errors import BadRequest, ConfigError, RequestError
from ridgeline.messages import TokenDelta
from ridgeline.process.progress import Tick, progress_bar
from ridgeline.resolve import model_path
from ridgeline.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ridgeline.engine.core.core import EngineCore

DEFAULTS = {"max_tokens": 256}
RECORD_START = b'{"id":'             # of every line this command writes
_BEGUN = re.compile(rb'\{"id":(?:-?\d*|"[^"\\]*(?:\\.[^"\\]*)*(?:\\|")?)')      # its id, or a part of it
_AFTER_ID = b',"outputs":', b',"error":'
MOST_LINE = 64 * 2**20               # bytes of INPUT
_PROMPTS = ("prompt", "prompt_token_ids", "messages")
_OTHERS = {"id", "cache_salt", "priority"}
_SAMPLING = {field.name for field in fields(SamplingParams)}

RecordId = str | int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s INPUT.jsonl OUTPUT.jsonl [options]"
    parser.add_argument(
        "input", metavar="INPUT.jsonl", type=Path,
        help="a line per prompt: {prompt | prompt_token_ids | messages, id, and any field of SamplingParams}",
    )
    parser.add_argument("output", metavar="OUTPUT.jsonl", type=Path, help="a line per answer, as they finish")
    parser.add_argument("--model", default="", help="name in the HF cache, directory or .gguf file; default: the embedded model")
    add_sampling_options(parser, DEFAULTS["max_tokens"])
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    given = sampling_given(args)
    SamplingParams(**given)                              # a wrong value fails before anything is loaded
    require_model(config)
    try:
        total = count_lines(args.input)
        if args.output.is_file() and args.output.samefile(args.input):
            raise ConfigError(f"{args.output} is both INPUT and OUTPUT; give another OUTPUT")
        done = finished_ids(args.output)
        checked_model(config)                            # before OUTPUT is made
        source, target = args.input.open("rb"), args.output.open("ab")
    except OSError as error:
        raise ConfigError(f"{error.filename or f'{args.input} or {args.output}'}: {error.strerror or error}") from None
    with source, target:
        if total and (skipped := answered_lines(source, done)) == total:
            print(f"0 answered, 0 failed, {skipped} already answered before", file=sys.stderr)       # and no model is loaded
            return 0
        # A wrong tokenizer or template fails before the weights load.
        processor = Processor.load(config.model, model_path(config), config.execution.speculative_config)
        # This imports torch: what can be wrong with the command line or its files has been told before.
        engine: type[EngineCore] = interrupt.import_module("ridgeline.engine.core.core").EngineCore
        with progress_bar("loading", in_bytes=True) as tick:
            core = engine.start(config, tick)
        defaults = {**DEFAULTS, **processor.sampling_defaults, **given}
        batch = Batch(core, processor, defaults, target, done)
        try:
            with progress_bar("answers") as tick:
                batch.run(read(source), total, tick)
        except KeyboardInterrupt:
            print("interrupted; run the same command again to continue", file=sys.stderr)
            return 130
        finally:
            core.close()
    print(f"{batch.answered} answered, {batch.failed} failed, {batch.skipped} already answered before", file=sys.stderr)
    return 0


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Line:
    """One line of the input: its record, or why there is none."""

    number: int
    record: dict[str, Any]
    error: str = ""

    @property
    def id(self) -> RecordId:
        """The line's id, or its number if the id is missing or has a wrong type."""
        own = self.record.get("id")
        return own if isinstance(own, (str, int)) and not isinstance(own, bool) else self.number


class WrittenRecord(msgspec.Struct):
    """What is read of a line of OUTPUT; no objects are made of the rest. One of `outputs` and `error` is there."""

    id: RecordId
    outputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def count_lines(path: Path) -> int:
    """0 for a pipe, which can be read only once."""
    if path.exists() and not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(1 for _, line in numbered(file) if line.strip())


def numbered(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers. A file without line ends, or a device, would fill the memory with its first line."""
    for number in count(1):
        if len(line := file.readline(MOST_LINE)) == MOST_LINE:
            raise ConfigError(f"{file.name}, line {number} has {MOST_LINE >> 20} MiB or more: is this JSONL?")
        if not line:
            return
        yield number, line


def read(file: IO[bytes]) -> Iterator[Line]:
    for number, text in numbered(file):
        if not text.strip():
            continue
        try:
            yield Line(number, msgspec.json.decode(text, type=dict[str, Any]))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            yield Line(number, {}, f"line {number} is not a JSON object: {error}")


def finished_ids(path: Path) -> set[RecordId]:
    """Ids that have their record; a last line that was only half written is cut off."""
    done: set[RecordId] = set()
    if not path.is_file():
        return done
    with path.open("r+b") as file:
        end = 0
        for number in count(1):
            # Only a line that begins as a record is read whole. It has no limit: log-probabilities of a prompt fill more than
            # MOST_LINE, and this command had them in memory when it wrote them.
            text = file.readline(len(RECORD_START))
            is_ours = RECORD_START.startswith(text)
            text += file.readline() if text == RECORD_START else b""
            if not text:
                break
            whole = text.endswith(b"\n")
            try:
                if whole:
                    record = msgspec.json.decode(text, type=WrittenRecord)
                    is_ours = msgspec.UNSET in (record.outputs, record.error) and record.outputs is not record.error
                    done.add(record.id)
            except (ValueError, RecursionError):
                is_ours = False
            if not is_ours or not (whole or is_begun_record(text)):
                raise ConfigError(f"{path}, line {number} was not written by this command; give another OUTPUT")
            end += len(text) if whole else 0
        file.truncate(end)
    return done


def answered_lines(file: IO[bytes], done: set[RecordId]) -> int:
    """How many lines have their record, up to the first one that has none; the file is then where it was."""
    found = sum(1 for _ in takewhile(lambda line: line.id in done, read(file))) if done else 0
    file.seek(0)
    return found


def is_begun_record(text: bytes) -> bool:
    """Whether this command can have written it before it was stopped: the last line of a file of prompts is not to be cut off."""
    begun = _BEGUN.match(text)
    rest = text[begun.end() :] if begun else b""
    return begun is None or any(each.startswith(rest) or rest.startswith(each) for each in _AFTER_ID)


# -- requests ----------------------------------------------------------------------------------------------------------


class Batch:
    """Keeps the engine supplied with requests and writes their answers."""

    def __init__(
        self, core: EngineCore, processor: Processor, defaults: dict[str, Any], target: IO[bytes], done: set[RecordId]
    ) -> None:
        self.answered = self.failed = self.skipped = 0
        self._core = core
        self._processor = processor
        self._defaults = defaults
        self._target = target
        self._before = done                              # in OUTPUT already
        self._seen: set[RecordId] = set()                # in this run
        self._open: dict[str, tuple[RecordId, RequestState]] = {}
        # Enough to refill every row at once, and to let the scheduler choose.
        self._most_open = 2 * core.config.max_num_seqs

    def run(self, lines: Iterator[Line], total: int, tick: Tick) -> None:
        more = True
        while more or self._open:
            while more and len(self._open) < self._most_open:
                line = next(lines, None)
                more = line is not None
                if line is not None:
                    self._start(line)
            if self._core.has_work:
                for delta in self._core.step():
                    self._take(delta)
            self._target.flush()
            ended = self.answered + self.failed + self.skipped
            tick(ended, max(total, ended + len(self._open)))         # the lines of a pipe are not counted before

    def _start(self, line: Line) -> None:
        if line.id in self._before:
            self.skipped += 1
            return
        try:
            if line.error:
                raise BadRequest(line.error)
            self._check_id(line)
            params = sampling_params(line.record, self._defaults)
            request, state = self._processor.request(
                self._prompt(line.record), params,
                priority=_of(line.record, "priority", int, 0), cache_salt=_of(line.record, "cache_salt", str, ""),
            )
            self._core.add(request)
        except RequestError as error:
            self._fail(line.id, str(error))
            return
        self._open[request.request_id] = (line.id, state)

    def _check_id(self, line: Line) -> None:
        if line.record.get("id", line.id) is not line.id:
            raise BadRequest(f"line {line.number}: id must be a text or a whole number")
        if line.id in self._seen:
            raise BadRequest(f"id {line.id!r} was used by an earlier line")
        self._seen.add(line.id)

    def _prompt(self, record: dict[str, Any]) -> Prompt:
        given = [name for name in _PROMPTS if record.get(name) is not None]
        if len(given) != 1:
            raise BadRequest(f"a line needs exactly one of {', '.join(_PROMPTS)}; got {', '.join(given) or 'none'}")
        if given == ["messages"]:
            return self._processor.chat_tokens(record["messages"])
        return {given[0]: _of(record, given[0], str if given[0] == "prompt" else list, None)}

    def _take(self, delta: TokenDelta) -> None:
        if delta.request_id not in self._open:
            return                                       # the request failed in another of its answers
        record_id, state = self._open[delta.request_id]
        if state.output.outputs[delta.index].finished():
            return                                       # a stop string has ended it
        try:
            _, stop_here = state.take(delta)
        except RequestError as error:
            self._core.abort(delta.request_id)
            del self._open[delta.request_id]
            self._fail(record_id, str(error))
            return
        if stop_here:
            self._core.abort(delta.request_id, delta.index)
        if state.output.finished:
            del self._open[delta.request_id]
            self.answered += 1
            self._write(answer_record(record_id, state.output))

    def _fail(self, record_id: RecordId, reason: str) -> None:
        self.failed += 1
        self._write({"id": record_id, "error": reason})

    def _write(self, record: dict[str, Any]) -> None:
        self._target.write(msgspec.json.encode(record) + b"\n")


def sampling_params(record: dict[str, Any], defaults: dict[str, Any]) -> SamplingParams:
    given = {name: value for name, value in record.items() if name not in _OTHERS and name not in _PROMPTS}
    unknown = sorted(given.keys() - _SAMPLING)
    if unknown:
        raise BadRequest(f"unknown field {unknown[0]!r}; a line has {', '.join(_PROMPTS)}, id and sampling parameters")
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    try:
        return msgspec.convert(defaults | given, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)) from None


def _of(record: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = record.get(name, default)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise BadRequest(f"{name} must be of type {kind.__name__}, got {type(value).__name__}")
    return value


def answer_record(record_id: RecordId, output: RequestOutput) -> dict[str, Any]:
    completion = sum(len(answer.token_ids) for answer in output.outputs)
    record: dict[str, Any] = {
        "id": record_id,
        "outputs": [_answer(answer) for answer in output.outputs],
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": completion,
            "cached_tokens": output.num_cached_tokens,
        },
    }
    if output.prompt is not None:
        record["prompt"] = output.prompt
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [*output.prompt_logprobs]
    return record


def _answer(answer: CompletionOutput) -> dict[str, Any]:
    written: dict[str, Any] = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if answer.logprobs is not None:
        written |= {"logprobs": [*answer.logprobs], "cumulative_logprob": answer.cumulative_logprob}
    return written
