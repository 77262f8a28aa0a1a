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
from collections.abc import Mapping, Sequence
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

from ridgeline.errors import BadRequest, Unsupported
from ridgeline.process.children import start_child

MAX_INPUT_BYTES = 32 << 20           # messages and tools, as JSON
LONG_INPUT_BYTES = 128 << 10         # longer ones are rendered in a process of their own
MAX_RENDERED = 8_000_000             # characters
RENDER_SECONDS = 1.25                # of CPU time: a busy machine makes no template fail
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
        conversation = plain_messages(messages)
        if continue_final_message:
            # The space after the mark shows whether the template trims messages.
            conversation[-1]["content"] += CONTINUE_MARK + " "
        text = _render(self._source(bool(tools)), {
            "documents": None,
            **self.special_tokens,
            **variables,
            "messages": conversation,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }, may_wait)
        return _cut_at_mark(text) if continue_final_message else text

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
        raise Unsupported(f"{where} is of type {str(kind)[:40]!r}; only text parts are supported", field=where)
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
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        return self.answer(_request(source, variables, self.seconds))

    def answer(self, request: bytes, may_wait: bool = True) -> str:
        if not self._lock.acquire(blocking=may_wait):
            raise RendererBusy
        try:
            if not may_wait and not self._is_running:    # its start takes half a second
                raise RendererBusy
            answer = _from_line(self._exchange(request))
        finally:
            self._lock.release()
        if "error" in answer:
            raise BadRequest(f"the chat template {answer['error']}")
        return str(answer["text"])

    def close(self) -> None:
        with self._lock:
            self._end()

    def _exchange(self, request: bytes) -> bytes:
        child = self._running()
        assert child.stdin is not None and child.stdout is not None
        answer = b""
        with suppress(BrokenPipeError):
            child.stdin.write(request)
            child.stdin.flush()
            answer = child.stdout.readline()
        if answer.endswith(b"\n"):
            return answer
        if self._end() == -signal.SIGPROF:   # it died, perhaps in the middle of its answer
            raise BadRequest(f"the chat template took more than {self.seconds:g} s of CPU time and was stopped")
        raise BadRequest(f"the chat template could not be rendered within {MEMORY_BYTES >> 20} MiB and was stopped")

    @property
    def _is_running(self) -> bool:
        return self._child is not None and self._owner == os.getpid() and self._child.poll() is None

    def _running(self) -> subprocess.Popen[bytes]:
        if not self._is_running:
            self._owner = os.getpid()        # a forked copy of this process must not share the pipes
            kept = {name: os.environ[name] for name in ("TZ", "LD_LIBRARY_PATH") if name in os.environ}
            self._child = start_child(
                __name__,
                environment=kept,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        assert self._child is not None
        return self._child

    def _end(self) -> int:
        """Close the pipes, which makes it exit, and return its status."""
        child, self._child = self._child, None
        if child is None:
            return 0
        assert child.stdin is not None and child.stdout is not None
        child.stdout.close()
        with suppress(BrokenPipeError):
            child.stdin.close()
        return child.wait()


def _to_line(value: Any) -> bytes:
    # Lone surrogates travel too; it is the tokenizer that refuses them.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _from_line(line: bytes) -> Any:
    return json.loads(line.decode("utf-8", "surrogatepass"))


_process = TemplateProcess()
_long_process = TemplateProcess()    # short chats do not wait behind long ones


def _request(source: str, variables: Mapping[str, Any], seconds: float) -> bytes:
    try:
        request = _to_line({"source": source, "variables": variables, "seconds": seconds})
    except (TypeError, ValueError, RecursionError):
        message = "messages, tools and template variables must be plain JSON data"
        raise BadRequest(message, field="messages") from None
    if len(request) > MAX_INPUT_BYTES:
        raise BadRequest(f"the messages take {len(request):,} bytes as JSON; {MAX_INPUT_BYTES:,} are allowed")
    return request


def _render(source: str, variables: Mapping[str, Any], may_wait: bool) -> str:
    request = _request(source, variables, _process.seconds)
    return (_long_process if len(request) > LONG_INPUT_BYTES else _process).answer(request, may_wait)


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
    """The child's whole life: a request per line on standard input, an answer per line on standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)         # Ctrl-C is for the owner; it closes the pipe when it leaves
    signal.signal(signal.SIGPROF, signal.SIG_DFL)        # the timer ends the process wherever it is, in C code too
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))    # no file can be written
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _compiled("")                                        # what the library loads lazily is loaded before the limit
    status = Path("/proc/self/statm")
    if status.exists():
        used = int(status.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    for line in sys.stdin.buffer:
        request = _from_line(line)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        answer = _to_line(_answer(request["source"], request["variables"]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
