"""Chat templates: from messages to the text of a prompt. The only file that makes a jinja2 environment.

A template is untrusted code from a model file. It runs in jinja2's immutable sandbox, which keeps it from Python, and in a
small process of its own, which limits its cost: an endless loop, a string of 10^9 characters, a power of huge numbers or a
list that holds itself 2^40 times cannot be interrupted inside a thread, but a process with limits on memory and CPU time
ends. The process sees plain JSON and no secrets, renders in about 0.2 ms, starts when first needed and exits with its owner.
This file does not know tokens: the tokenizer encodes the rendered text.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ridgeline.errors import BadRequest, ConfigError, NotNow, RequestError, TryAgain, Unsupported, shown
from ridgeline.process.framed_child import FramedChild, Stopped, ask_another_if_stopped, read_frame, write_frame
from ridgeline.text.template_dialects import adapt_calls, parts_of, probes, shows_parts, with_parts

MAX_INPUT_BYTES = 32 << 20           # messages and tools, as JSON
LONG_INPUT_BYTES = 128 << 10         # longer ones are rendered in a process of their own
MAX_RENDERED = 8_000_000             # characters
RENDER_SECONDS = 1.25                # of CPU time: a busy machine makes no template fail
_WAIT_SECONDS = 10.0                 # of wall-clock time, for a process that gets no CPU, or was stopped
_START_SECONDS = 60.0                # the same for the first answer of a process, which it imports modules for
_MOMENT = 0.05                       # the same for a caller that may not wait; most renders take 0.2 ms
MEMORY_BYTES = 96 << 20              # what a render may take on top of the idle process

RESERVED = frozenset(
    "messages tools add_generation_prompt continue_final_message tokenize chat_template "
    "raise_exception strftime_now namespace range dict".split()
)
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
TEXT_PARTS = ("text", "input_text", "output_text")       # what OpenAI's APIs call a part of text
# Other fields that clients send in a text part, as hints or because they echo a response; none of them enters the prompt.
PART_FIELDS = frozenset({
    "type", "text", "id", "index", "name", "annotations", "citations", "logprobs", "refusal", "detail", "cache_control",
    "prompt_cache_breakpoint", "extras", "additional_kwargs", "provider_specific_fields", "providerOptions", "provider_options",
})
CONTINUE_MARK = "THE-FINAL-MESSAGE-GOES-ON-HERE"


class ChatTemplate:
    """The templates of one model, by name: "default", and perhaps "tool_use" for requests that bring tools."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self.templates = templates
        self.special_tokens = special_tokens
        self._takes_parts: dict[str, bool] = {}          # by a template's source, of a conversation of one message

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        may_wait: bool = True,
    ) -> str:
        """`variables` are what else the template may ask for (enable_thinking …). Every failure is a RequestError; without
        `may_wait`, RendererBusy if the process that renders is busy or not started."""
        variables = variables or {}
        for name in variables.keys() & (RESERVED | self.special_tokens.keys()):
            raise BadRequest(f"chat template variable {name!r} is reserved; choose another name")
        if continue_final_message and add_generation_prompt:
            message = "continue_final_message needs add_generation_prompt=false: no new message begins"
            raise BadRequest(message, field="continue_final_message")
        conversation, source = plain_messages(messages), self._source(bool(tools))
        several = {place: parts for place, message in enumerate(messages) if (parts := parts_of(message))}
        if continue_final_message:
            # The space after the mark shows whether the template trims messages.
            conversation[-1]["content"] += CONTINUE_MARK + " "
            several.pop(len(conversation) - 1, None)
        adapt_calls(source, conversation)
        given = {
            "documents": None,
            **self.special_tokens,
            **variables,
            "messages": conversation,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        if several and self._shows_parts(source, given, several, may_wait):
            given["messages"] = with_parts(conversation, several)      # the template joins them in its own way
        text = _render(source, given, may_wait)
        return _cut_at_mark(text) if continue_final_message else text

    def _shows_parts(self, source: str, given: Mapping[str, Any], places: Collection[int], may_wait: bool) -> bool:
        """Whether the template takes parts in the messages at these places. Some take them in most messages, and print those of
        another as objects (the first one, if there are tools) or fail: what one conversation shows says nothing of others."""

        def shown(variables: Mapping[str, Any], where: Collection[int]) -> bool:
            asked = {**variables, "messages": with_parts(variables["messages"], probes(where))}
            try:
                return shows_parts(_render(source, asked, may_wait), where)
            except (BadRequest, Unsupported):            # it cannot do with parts
                return False

        if source not in self._takes_parts:              # most templates take none at all, which one render shows for good
            one = {"documents": None, **self.special_tokens, "messages": [{"role": "user", "content": ""}], "tools": None}
            self._takes_parts[source] = shown({**one, "add_generation_prompt": True}, (0,))
        return self._takes_parts[source] and shown(given, places)

    def _source(self, with_tools: bool) -> str:
        if with_tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if "default" not in self.templates:
            raise BadRequest(
                "this model has no chat template: start with --chat-template FILE, "
                "or send the whole prompt as text to the completions endpoint"
            )
        return self.templates["default"]


def _cut_at_mark(text: str) -> str:
    place = text.rfind(CONTINUE_MARK)
    if place < 0:
        message = "continue_final_message: the chat template leaves out the final message"
        raise BadRequest(message, field="continue_final_message")
    kept = text[:place]
    return kept if text.startswith(" ", place + len(CONTINUE_MARK)) else kept.rstrip()


# --- messages ---


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy in the form templates expect: content is a string, the arguments of tool calls are objects."""
    if not isinstance(messages, list | tuple) or not messages:
        raise BadRequest("messages must be a list with at least one message", field="messages")
    return [_plain_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _plain_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRequest(f"{where} must be an object with a role and a content", field=where)
    if message["role"] in ("user", "system") and message.get("content") is None:
        raise BadRequest(f"{where}.content is missing; a message of role {message['role']} needs it", field=f"{where}.content")
    plain = {**message, "content": _plain_content(message.get("content"), f"{where}.content")}
    calls = plain.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise BadRequest(f"{where}.tool_calls must be a list", field=f"{where}.tool_calls")
        plain["tool_calls"] = [_plain_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)]
    reasoning = next((message[name] for name in REASONING_NAMES if message.get(name) is not None), None)
    if reasoning is not None:        # clients and templates call it by different names
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _plain_content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a string or a list of text parts", field=where)
    return "\n".join(_part_text(part, f"{where}[{place}]") for place, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or kind not in TEXT_PARTS:
        raise Unsupported(f"{where} is of type {shown(kind)}; only text parts are supported", field=where)
    if not isinstance(part.get("text"), str):
        raise BadRequest(f"{where}.text must be a text", field=f"{where}.text")
    for name, value in part.items():
        if name not in PART_FIELDS and value is not None:
            message = f"{where}.{str(name)[:40]} is not supported; a text part has a type and a text"
            raise Unsupported(message, field=where)
    return str(part["text"])


def _plain_call(call: Any, where: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise BadRequest(f"{where} must be an object with a function", field=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise BadRequest(f"{where}.function.arguments is not valid JSON", field=where) from None
    return {**call, "function": {**function, "arguments": arguments}}


# --- the process, seen from outside ---


class RendererBusy(Exception):
    """The template cannot be rendered without waiting."""


class TemplateProcess:
    """A child process that renders templates, one at a time. If it dies, the next render starts a new one."""

    def __init__(self, seconds: float = RENDER_SECONDS) -> None:
        self.seconds = seconds
        self._child: FramedChild | None = None
        self._owner = 0
        self._has_answered = False
        self._lock = threading.Lock()

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        return self.answer(_request(source, variables, self.seconds))

    def answer(self, request: bytes, may_wait: bool = True) -> str:
        """Waits for no longer than its deadlines. Without `may_wait` it may be called on an event loop: RendererBusy if the
        process is busy, is not started, or does not answer in a moment."""
        if not self._lock.acquire(timeout=_WAIT_SECONDS if may_wait else 0):
            if may_wait:
                raise NotNow("too many chats are waiting for their template; try again later", 1.0)
            raise RendererBusy
        try:
            answer = _from_bytes(ask_another_if_stopped(lambda: self._exchange(request, may_wait), "renders chat templates"))
        finally:
            self._lock.release()
        if "error" in answer:
            raise BadRequest(f"the chat template {answer['error']}")
        return str(answer["text"])

    def start(self) -> None:
        """Before the first chat, which would wait for it."""
        with self._lock, suppress(OSError):              # the first chat reports what is wrong
            self._running()

    def close(self) -> None:
        with self._lock:
            child, self._child = self._child, None
            if child is not None:
                child.end()

    def _exchange(self, request: bytes, may_wait: bool) -> bytes:
        if not may_wait and not (self._is_running and self._has_answered):       # its start takes half a second
            raise RendererBusy
        try:
            child = self._running()
        except OSError as error:
            raise TryAgain(f"the process that renders chat templates cannot be started ({error.strerror})", 1.0) from None
        try:
            seconds = _WAIT_SECONDS if self._has_answered else _START_SECONDS
            answer = child.ask(request, seconds if may_wait else _MOMENT, patient=may_wait)
            self._has_answered = True
            return answer
        except Stopped:
            raise
        except TimeoutError:
            if not may_wait:
                raise RendererBusy from None
            self._child = None
            raise TryAgain(f"the chat template was not rendered within {seconds:g} s; try again later", 1.0) from None
        except EOFError:
            self._child = None
            raise self._death(child.process.wait()) from None

    def _death(self, code: int) -> RequestError:
        """Why the process ended while it rendered. Signals that it does not raise itself come from outside: an operator, or the
        kernel when memory is short. Then the messages are not to blame."""
        if code == -signal.SIGPROF:
            return BadRequest(f"the chat template took more than {self.seconds:g} s of CPU time and was stopped")
        if code in (-signal.SIGKILL, -signal.SIGTERM):
            return TryAgain("the process that rendered the chat template was killed; try again later", 1.0)
        return BadRequest(f"the chat template could not be rendered within {MEMORY_BYTES >> 20} MiB and was stopped")

    @property
    def _is_running(self) -> bool:
        return self._child is not None and self._owner == os.getpid() and self._child.alive

    def _running(self) -> FramedChild:
        if self._child is None or not self._is_running:
            if self._child is not None and self._owner != os.getpid():
                self._child.end.detach()     # a forked copy of this process must not share the pipes, nor end their process
            self._owner = os.getpid()
            kept = {name: os.environ[name] for name in ("TZ", "LD_LIBRARY_PATH") if name in os.environ}
            self._child, self._has_answered = FramedChild(__name__, environment=kept, stderr=subprocess.DEVNULL), False
        return self._child


def _to_bytes(value: Any) -> bytes:
    # Lone surrogates travel too; it is the tokenizer that refuses them.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _from_bytes(frame: bytes) -> Any:
    return json.loads(frame.decode("utf-8", "surrogatepass"))


def _request(source: str, variables: Mapping[str, Any], seconds: float) -> bytes:
    try:
        request = _to_bytes({"source": source, "variables": variables, "seconds": seconds})
    except (TypeError, ValueError, RecursionError):
        message = "messages, tools and template variables must be plain JSON data"
        raise BadRequest(message, field="messages") from None
    if len(request) > MAX_INPUT_BYTES:
        raise BadRequest(f"the messages take {len(request):,} bytes as JSON; {MAX_INPUT_BYTES:,} are allowed")
    return request


_process = TemplateProcess()
_long_process = TemplateProcess()    # short chats do not wait behind long ones


def _render(source: str, variables: Mapping[str, Any], may_wait: bool) -> str:
    request = _request(source, variables, _process.seconds)
    return (_long_process if len(request) > LONG_INPUT_BYTES else _process).answer(request, may_wait)


def start_renderer() -> None:
    """Start the process for short chats. It takes half a second of CPU time until it answers; this does not wait for it."""
    _process.start()


# --- the process, seen from inside ---


class _Refused(jinja2.TemplateError):
    """The template itself called raise_exception."""


class _TooLong(Exception):
    """The text grew past the limit."""


class _Generation(Extension):
    """{% generation %} … {% endgeneration %} marks what a model wrote, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - the base class wants a plain set

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _PlainNamespace(Namespace):
    """A namespace without underscored names: those are Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, names = args[0], dict(*args[1:], **kwargs)
        Namespace.__init__(self)
        for name, value in names.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str) or name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot have the name {name!r}")
        super().__setitem__(name, value)


class _PlainDict:
    """`dict(...)` for templates; the real type has attributes to climb on."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own, leaves HTML characters and other scripts alone: it is text for a model, not for a page."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def template_environment() -> ImmutableSandboxedEnvironment:
    """The dialect chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_PlainNamespace, dict=_PlainDict()
    )
    return environment


def check_template(source: str) -> None:
    """ConfigError for a text that is no template. What it does with messages is known when it has some."""
    try:
        template_environment().parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"chat_template is not valid (line {error.lineno}): {error}") from None
    except RecursionError:
        raise ConfigError("chat_template is nested too deeply") from None


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    return template_environment().from_string(source)


def _rendered(source: str, variables: Mapping[str, Any]) -> str:
    pieces, length = [], 0
    for piece in _compiled(source).generate(variables):
        pieces.append(piece)
        length += len(piece)
        if length > MAX_RENDERED:
            raise _TooLong
    return "".join(pieces)


def _answer(source: str, variables: Mapping[str, Any]) -> dict[str, str]:
    try:
        return {"text": _rendered(source, variables)}
    except _Refused as error:
        reason = f"refused the messages: {error}"
    except jinja2.TemplateSyntaxError as error:
        reason = f"is not valid (line {error.lineno}): {error}"
    except jinja2.exceptions.SecurityError as error:
        reason = f"tried something unsafe: {error}"
    except _TooLong:
        reason = f"makes a text of more than {MAX_RENDERED:,} characters"
    except MemoryError:
        reason = f"needs more than {MEMORY_BYTES >> 20} MiB"
    except RecursionError:
        reason = "calls itself too deeply"
    except Exception as error:       # it is a program: anything can go wrong in it
        reason = f"failed: {type(error).__name__}: {error}"
    # One line, and no addresses of this process in it.
    return {"error": re.sub(r" at 0x[0-9a-fA-F]+", "", " ".join(reason.split()))[:500]}


def serve() -> None:
    """The child's whole life: a request per frame on standard input, an answer per frame on standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)         # Ctrl-C is for the owner; it closes the pipe when it leaves
    signal.signal(signal.SIGPROF, signal.SIG_DFL)        # the timer ends the process wherever it is, in C code too
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))    # no file can be written
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _compiled("")                                        # what the library loads lazily is loaded before the limit
    status = Path("/proc/self/statm")
    if status.exists():
        used = int(status.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        request = _from_bytes(frame)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        answer = _to_bytes(_answer(request["source"], request["variables"]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(sys.stdout.buffer, answer)


if __name__ == "__main__":
    serve()
