"""The conversation itself: reads lines, obeys commands, writes answers. Knows no engine."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from ridgeline.cli.chat.ctrl_c import CtrlC
from ridgeline.cli.chat.talk import ChatModel, Message, Reply
from ridgeline.errors import ConfigError, RequestError
from ridgeline.report.control_characters import harmless
from ridgeline.sampling_params import SamplingParams
from ridgeline.user_files import read_json

SHORT_HELP = "/help lists the commands, Ctrl-D leaves, Ctrl-C stops an answer"
HELP = """\
/clear               forget the conversation, keep the system message
/system [TEXT]       show the system message, or set it and start over; /system - removes it
/set [NAME VALUE]    show or change temperature, top_p, top_k, min_p, repetition_penalty, max_tokens, seed
/save FILE           write the conversation as JSON
/load FILE           continue a saved conversation
/exit                leave; so does Ctrl-D
\"\"\"                  begins and ends a message of several lines
Ctrl-C               stop an answer; what was written stays in the conversation"""
_SETTINGS: dict[str, type] = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float, "max_tokens": int,
    "seed": int,
}
_FENCE = '"""'


class Conversation:
    def __init__(self, model: ChatModel, settings: dict[str, Any], system: str = "") -> None:
        self._model = model
        self._settings = dict(settings)
        self._system = system
        self._messages: list[Message] = []
        self._interactive = sys.stdin.isatty()
        self._ctrl_c = CtrlC()
        self._colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def beginning(self) -> list[Message]:
        return [{"role": "system", "content": self._system}] if self._system else []

    def run(self, prompt: str = "") -> None:
        """With a prompt: its answer alone, and nothing is read."""
        if prompt:
            self._interactive = False
            self._reply(prompt)
            if not self._messages:                       # refused, and said so
                sys.exit(2)
            return
        if not self._interactive:
            self._converse()
            return
        importlib.import_module("readline")              # line editing and history for input()
        with self._ctrl_c.installed():
            print(harmless(self._model.describe()))
            self._tell(SHORT_HELP)
            self._converse()

    def _converse(self) -> None:
        while (text := self._ask()) is not None:
            if not text.strip():
                continue
            if not text.startswith("/"):
                self._reply(text)
            elif not self._command(*text.partition(" ")[::2]):
                return

    # -- input ---------------------------------------------------------------------------------------------------------

    def _ask(self) -> str | None:
        """The next message; None at the end."""
        while True:
            try:
                with self._ctrl_c:
                    line = self._line(">>> ")
                    return self._several(line) if line.startswith(_FENCE) else line
            except EOFError:
                if self._interactive:
                    print()
                return None
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                print()
                self._tell(SHORT_HELP)

    def _line(self, prompt: str) -> str:
        if not self._interactive:
            return input()
        return input(f"\001\033[1;32m\002{prompt}\001\033[0m\002" if self._colour else prompt)

    def _several(self, first: str) -> str:
        lines = [first.removeprefix(_FENCE)]
        while not lines[-1].rstrip().endswith(_FENCE):
            lines.append(self._line("... "))
        lines[-1] = lines[-1].rstrip().removesuffix(_FENCE)
        return "\n".join(lines).strip("\n")

    # -- commands ------------------------------------------------------------------------------------------------------

    def _command(self, name: str, rest: str) -> bool:
        """False: leave."""
        rest = rest.strip()
        match name:
            case "/exit" | "/quit" | "/bye":
                return False
            case "/help" | "/?":
                print(HELP)
            case "/clear" | "/reset" | "/new":
                self._messages = []
            case "/system":
                self._set_system(rest)
            case "/set":
                self._set(rest)
            case "/save":
                self._save(rest)
            case "/load":
                self._load(rest)
            case _:
                self._complain(f"unknown command {name}; /help lists the commands. A blank before the / makes it a message")
        return True

    def _set_system(self, text: str) -> None:
        if not text:
            print(harmless(self._system) or "there is no system message")
            return
        self._system = "" if text == "-" else text.strip('"')
        self._messages = []

    def _set(self, rest: str) -> None:
        rest = rest.removeprefix("parameter ")           # as in Ollama
        name, _, value = rest.replace("=", " ").partition(" ")
        name = name.replace("-", "_")
        if not name:
            shown = ", ".join(f"{key} {each}" for key, each in self._settings.items())
            print(shown or "nothing is set: the model's own defaults are used")
            return
        if name not in _SETTINGS:
            self._complain(f"/set knows {', '.join(_SETTINGS)}; not {name!r}")
            return
        if not value.strip():
            print(f"{name} {self._settings[name]}" if name in self._settings else f"{name} is not set")
            return
        try:
            changed = self._settings | {name: _SETTINGS[name](value.strip())}
            SamplingParams(**changed)
        except ValueError:
            self._complain(f"{name} must be a number, got {value.strip()!r}")
        except RequestError as error:
            self._complain(str(error))
        else:
            self._settings = changed

    def _save(self, file: str) -> None:
        if not file:
            self._complain("/save needs a file")
            return
        record = {"system": self._system, "messages": self._messages, "settings": self._settings}
        try:
            Path(file).expanduser().write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            self._complain(f"{file} cannot be written: {error.strerror}")
        else:
            self._tell(f"saved {len(self._messages)} messages")

    def _load(self, file: str) -> None:
        if not file:
            self._complain("/load needs a file")
            return
        try:
            record = read_json(file)
            messages = [{"role": str(each["role"]), "content": str(each["content"])} for each in record["messages"]]
            settings = {name: kind(record["settings"][name]) for name, kind in _SETTINGS.items() if name in record["settings"]}
            SamplingParams(**settings)
            self._system, self._messages, self._settings = str(record["system"]), messages, settings
        except ConfigError as error:
            self._complain(str(error))
        except (ValueError, LookupError, TypeError, RequestError):
            self._complain(f"{file} was not written by /save")
        else:
            self._tell(f"loaded {len(messages)} messages")

    # -- answers -------------------------------------------------------------------------------------------------------

    def _reply(self, text: str) -> None:
        """Stream the answer. An interrupted answer stays in the conversation; a refused message does not."""
        self._messages.append({"role": "user", "content": text})
        parts: list[str] = []
        shows = sys.stdout.isatty()                      # a pipe gets what the model wrote

        def write(part: str) -> None:
            parts.append(part)
            sys.stdout.write(harmless(part) if shows else part)
            sys.stdout.flush()

        reply = None
        try:
            with self._ctrl_c:
                reply = self._model.reply([*self.beginning(), *self._messages], self._settings, write)
        except RequestError as error:
            if parts:                                    # it broke off: what has come is kept
                print("", flush=True)
            else:
                self._messages.pop()
            self._complain(f"{error}" + ("; /clear starts over" if self._interactive else ""))
            if not parts:
                return
        except KeyboardInterrupt:
            if not self._interactive:
                raise
        if reply is not None or self._interactive:
            print("", flush=True)
        self._messages.append({"role": "assistant", "content": "".join(parts)})
        self._say_how_it_went(reply)

    def _say_how_it_went(self, reply: Reply | None) -> None:
        if reply is None:
            self._tell("stopped")
            return
        if reply.finish_reason == "length":
            where = "the end of the context" if reply.max_tokens is None else f"max_tokens {reply.max_tokens}"
            self._complain(f"cut at {where}" + ("; /set max_tokens N allows more" if self._interactive else ""))
        rate = f", {reply.rate:.1f} tokens/s" if reply.rate is not None else ""
        self._tell(f"{reply.tokens} tokens{rate}, first after {reply.first_s:.2f} s")

    def _tell(self, text: str) -> None:
        """A remark for people; a pipe gets the answers alone."""
        if self._interactive:
            text = harmless(text)
            print(f"\033[2m{text}\033[0m" if self._colour else text, flush=True)

    def _complain(self, text: str) -> None:
        print(harmless(text), file=sys.stderr, flush=True)
