"""The conversation of `ridgeline chat` with a scripted model, and with a server over HTTP; test_cli.py runs the command."""

from __future__ import annotations

import http.client
import io
import json
import logging
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ridgeline.__main__ import main
from ridgeline.bench.load.serve_options import headers
from ridgeline.cli.chat import cmd_chat
from ridgeline.cli.chat.conversation import Conversation
from ridgeline.cli.chat.remote_model import RemoteModel
from ridgeline.cli.chat.talk import Reply
from ridgeline.cli.config_options import OptionParser
from ridgeline.diagnose.attach import attach
from ridgeline.errors import BadRequest, ConfigError, RequestError
from ridgeline.process.log import quiet_by_default


class Scripted:
    """Answers with the number of messages that it got; `fails` is raised instead, after "half" where `late`."""

    def __init__(self) -> None:
        self.got: list[list[dict[str, Any]]] = []
        self.settings: list[dict[str, Any]] = []
        self.fails: BaseException | None = None
        self.late = False
        self.finish = "stop"

    def describe(self) -> str:
        return "a scripted model"

    def reply(self, messages: list[dict[str, Any]], settings: dict[str, Any], write: Callable[[str], None]) -> Reply:
        self.got.append([dict(each) for each in messages])
        self.settings.append(dict(settings))
        if self.fails is not None:
            if self.late:
                write("half")
            raise self.fails
        write(f"answer {len(messages)}")
        return Reply(5, self.finish, 0.5, 2.5, settings.get("max_tokens"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


Said = tuple[Scripted, str, str]


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    def run(
        text: str, model: Scripted | None = None, tty: bool = False, system: str = "", prompt: str = "", **settings: Any
    ) -> Said:
        monkeypatch.setattr("sys.stdin", Terminal(text) if tty else io.StringIO(text))
        model = model or Scripted()
        Conversation(model, settings, system).run(prompt)
        said = capsys.readouterr()
        return model, said.out, said.err

    return run


def test_a_pipe_gets_the_answers_alone(chat: Callable[..., Said]) -> None:
    model, out, err = chat("Hello\n\nMore\n", system="Be brief.")
    assert (out, err) == ("answer 2\nanswer 4\n", "")
    assert [each["role"] for each in model.got[1]] == ["system", "user", "assistant", "user"]


def test_a_prompt_on_the_command_line_gets_one_answer(chat: Callable[..., Said]) -> None:
    model, out, err = chat("not read\n", tty=True, system="Be brief.", prompt="/why is the sky blue?")
    assert (out, err, len(model.got)) == ("answer 2\n", "", 1) and model.got[0][1]["content"] == "/why is the sky blue?"
    model.fails = BadRequest("too long")
    with pytest.raises(SystemExit) as ended:
        chat("", model, prompt="Hello")
    assert ended.value.code == 2


@pytest.mark.parametrize(("first", "asked"), [
    ("Why is it blue?", ("", "Why is it blue?")), ("X", ("X", "")), ("why " * 100, ("", "why " * 100)),
])
def test_a_sentence_in_place_of_the_model_is_the_prompt(
    first: str, asked: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(cmd_chat, "RemoteModel", lambda url, model: seen.append(model))
    monkeypatch.setattr(Conversation, "run", lambda self, prompt: seen.append(prompt))
    assert main(["chat", "--url", "http://127.0.0.1:1", first]) == 0 and tuple(seen) == asked


@pytest.mark.parametrize("words", [
    "X Hello", "-m X -p Hello", "X --prompt=Hello", "--model X Hello", "Hello -m X", "-m X -- Hello", "X --temperature 0 Hello",
    "X --seed 1 Hello --top-k 2", "--seed 1 -m X --top-k 2 Hello", "X --seed 1 -- Hello",
])
def test_where_the_prompt_stands(words: str) -> None:
    parser = OptionParser(prog="ridgeline chat")
    cmd_chat.add_arguments(parser)
    args = parser.parse(words.split())
    assert (args.model, args.message or args.prompt) == ("X", "Hello")


def test_unquoted_words_behind_a_model_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The first of them would be the model, and the one that was named would be left out."""
    assert main(["chat", "--url", "http://127.0.0.1:1", "-m", "X", "hello", "there"]) == 2
    assert "unexpected argument 'there'" in capsys.readouterr().err


def test_two_prompts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """One of them would be left out without a word."""
    assert main(["chat", "--url", "http://127.0.0.1:1", "X", "Hello", "--prompt", "Bye"]) == 2
    assert "the prompt is given twice" in capsys.readouterr().err


def test_what_a_model_writes_does_not_command_the_terminal(
    chat: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Escape sequences overwrite the screen, set the title and write to the clipboard; C1 controls do so in one character."""
    attack = "a\x1b[2J\x1b]0;title\x07b\x9b31mc\x08\x7f\x00 over\rwrite\r\n\tend"

    class Attacker(Scripted):
        def describe(self) -> str:
            return f"model {attack}"

        def reply(self, messages: list[dict[str, Any]], settings: dict[str, Any], write: Callable[[str], None]) -> Reply:
            self.got.append([dict(each) for each in messages])
            if len(messages) > 1:
                raise RequestError(attack)
            write(attack)
            return Reply(5, "stop", 0.5, 2.5, None)

    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    model, out, err = chat("Hello\nMore\n", Attacker(), tty=True)
    harmless = "a^[[2J^[]0;title^Gb<9b>31mc^H^?^@ overwrite\n\tend"
    assert out.count(harmless) == 2 and harmless in err
    assert not {each for each in out + err if ord(each) < 32 or 127 <= ord(each) < 160} - {"\n", "\t"}
    assert model.got[1][1]["content"] == attack          # the conversation has it as it was
    monkeypatch.undo()


def test_a_terminal_gets_the_model_and_the_speed_and_no_colour_unless_stdout_is_one(chat: Callable[..., Said]) -> None:
    _, out, _ = chat("Hello\n", tty=True)
    assert out.startswith("a scripted model\n/help lists the commands") and "\033" not in out
    assert "5 tokens, 2.0 tokens/s, first after 0.50 s" in out


def test_a_cut_answer_says_so(chat: Callable[..., Said]) -> None:
    model = Scripted()
    model.finish = "length"
    assert chat("Hello\n", model, max_tokens=5)[2] == "cut at max_tokens 5\n"
    assert chat("Hello\n", model)[2] == "cut at the end of the context\n"
    assert "; /set max_tokens N allows more" in chat("Hello\n", model, tty=True, max_tokens=5)[2]


def test_several_lines(chat: Callable[..., Said]) -> None:
    model, _, _ = chat('"""one\n\n/two\nthree"""\n"""\nfour\n"""\n"""five"""\n'.replace('"""five"""', '"""five\n"""'))
    assert [each[-1]["content"] for each in model.got] == ["one\n\n/two\nthree", "four", "five"]


def test_commands(chat: Callable[..., Said]) -> None:
    model, out, err = chat(
        "Hello\n/clear\nHello\n/system Be kind.\nHello\n/system\n/system -\n/system\nHello\n/help\n/bye\nHello\n"
    )
    assert out.startswith("answer 1\nanswer 1\nanswer 2\nBe kind.\nthere is no system message\nanswer 1\n/clear ") and not err
    assert model.got[2][0] == {"role": "system", "content": "Be kind."} and len(model.got) == 4


def test_an_unknown_command_is_not_sent_to_the_model(chat: Callable[..., Said]) -> None:
    model, _, err = chat("/foo bar\n /etc/hosts\n")
    assert err.startswith("unknown command /foo; /help lists the commands") and len(model.got) == 1
    assert model.got[0][0]["content"] == " /etc/hosts"


def test_settings(chat: Callable[..., Said]) -> None:
    model, out, err = chat(
        "/set\n/set temperature 0.5\n/set top_k=7\n/set max-tokens 9\nHello\n/set\n/set top_p 7\n/set top_p x\n/set topp 1\n"
    )
    assert model.settings == [{"temperature": 0.5, "top_k": 7, "max_tokens": 9}]
    assert out.startswith("nothing is set") and "temperature 0.5, top_k 7, max_tokens 9" in out
    assert [line[:20] for line in err.splitlines()] == ["top_p must be a numb", "top_p must be a numb", "/set knows temperatu"]


def test_set_without_a_value_shows_it_and_takes_ollamas_form(chat: Callable[..., Said]) -> None:
    _, out, err = chat("/set top_k\n/set parameter top_k 7\n/set top_k\n")
    assert out.splitlines()[-2:] == ["top_k is not set", "top_k 7"] and not err


def test_save_and_load(chat: Callable[..., Said], tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    chat(f"/set seed 3\nHello\n/save {file}\n", system="Be brief.")
    model, out, err = chat(f"/load {file}\nMore\n")
    assert (out, err) == ("answer 4\n", "") and model.settings == [{"seed": 3}]
    assert [each["content"] for each in model.got[0]] == ["Be brief.", "Hello", "answer 2", "More"]
    file.write_text("{}")
    _, _, err = chat(f"/load {file}\n/load\n/load /nowhere/x\n/save /nowhere/x\n/save\n")
    assert err.splitlines() == [
        f"{file} was not written by /save", "/load needs a file", "/nowhere/x cannot be read: No such file or directory",
        "/nowhere/x cannot be written: No such file or directory", "/save needs a file",
    ]


def test_a_refused_message_is_forgotten(chat: Callable[..., Said]) -> None:
    model = Scripted()
    model.fails = BadRequest("too long")
    _, out, err = chat("Hello\n", model)
    assert (out, err) == ("", "too long\n")
    model.late = True                                    # it broke off: what came is kept
    _, out, err = chat("Hello\nMore\n", model)
    assert out == "half\nhalf\n" and [each["content"] for each in model.got[-1]] == ["Hello", "half", "More"]


def test_ctrl_c_keeps_what_was_written(chat: Callable[..., Said]) -> None:
    model = Scripted()
    model.fails, model.late = KeyboardInterrupt(), True
    _, out, _ = chat("Hello\nMore\n", model, tty=True)
    assert [each["content"] for each in model.got[1]] == ["Hello", "half", "More"] and "half\nstopped\n" in out
    with pytest.raises(KeyboardInterrupt):               # a pipe's writer is not there to go on
        chat("Hello\n", model)


def test_a_ctrl_c_that_repeats_does_not_end_the_conversation(
    chat: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A held key sends the next one while the first is being handled, and between an answer and the next prompt."""
    asked: list[str] = []

    def hears(prompt: str = "") -> str:
        asked.append(prompt)
        if len(asked) == 1:
            signal.raise_signal(signal.SIGINT)
        if len(asked) <= 3:
            return "Hello"
        raise EOFError

    class HeldDown(Terminal):
        def write(self, text: str) -> int:
            signal.raise_signal(signal.SIGINT)
            return super().write(text)

    class Stopped(Scripted):
        def reply(self, messages: list[dict[str, Any]], settings: dict[str, Any], write: Callable[[str], None]) -> Reply:
            self.got.append(messages)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("the answer went on")

    monkeypatch.setattr("builtins.input", hears)
    monkeypatch.setattr("sys.stdout", HeldDown())
    model = Stopped()
    before = signal.getsignal(signal.SIGINT)
    written = sys.stdout
    chat("", model, tty=True)
    assert len(asked) == 4 and len(model.got) == 2 and signal.getsignal(signal.SIGINT) is before
    assert isinstance(written, HeldDown) and "stopped" in written.getvalue()


def test_chat_is_quiet_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("ridgeline")
    before = logger.level
    try:
        for given, level in ((None, logging.WARNING), ("DEBUG", logging.DEBUG)):
            monkeypatch.delenv("RIDGELINE_LOG", raising=False)
            if given:
                monkeypatch.setenv("RIDGELINE_LOG", given)
            quiet_by_default()
            assert logger.level == level
    finally:
        logger.setLevel(before)


# -- a running server --------------------------------------------------------------------------------------------------


DEEP = b"[" * 50_000


class Recorded(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that streams two words; its class keeps what it was asked."""

    asked: ClassVar[list[tuple[str, str, dict[str, Any]]]] = []          # path, key, body
    key = ""
    tail = b"data: [DONE]\n\n"
    models = b'{"data": [{"id": "tiny"}, {"id": "other"}]}'
    error = b'{"error": {"message": "a bad\\nmessage"}}'

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self._send(200, self.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append((self.path, self.headers.get("Authorization", ""), body))
        if self.key and self.headers.get("Authorization") != f"Bearer {self.key}":
            self._send(401, b'{"error": {"message": "no"}}')
        elif body["messages"][-1]["content"] == "bad":
            self._send(400, self.error)
        else:
            events: list[dict[str, Any]] = [{"choices": [{"delta": {"content": word}}]} for word in ("Good ", "day")]
            events += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}, {"choices": [], "usage": {"completion_tokens": 7}}]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events) + self.tail)

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("RIDGELINE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Recorded, "asked", [])
    listening = ThreadingHTTPServer(("127.0.0.1", 0), Recorded)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_address[1]}"
    listening.shutdown()
    listening.server_close()


def test_chat_with_a_server(server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nbad\n"))
    assert main(["chat", "--url", server, "--system", "Be brief.", "--temperature", "0.5"]) == 0
    said = capsys.readouterr()
    assert said.out == "Good day\n" and said.err == "a bad message\n"
    path, key, body = Recorded.asked[0]
    assert (path, key) == ("/v1/chat/completions", "") and body["model"] == "tiny" and body["temperature"] == 0.5
    assert [each["role"] for each in body["messages"]] == ["system", "user"] and "top_p" not in body


def test_the_key_comes_from_the_environment(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorded, "key", "secret")
    model, parts = RemoteModel(f"{server}/v1/", "named"), []
    with pytest.raises(ConfigError, match="needs an API key: set RIDGELINE_API_KEY"):
        model.reply([{"role": "user", "content": "Hello"}], {}, parts.append)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    reply = model.reply([{"role": "user", "content": "Hello"}], {}, parts.append)
    assert (reply.tokens, reply.finish_reason, "".join(parts)) == (7, "stop", "Good day")
    assert model.describe() == f"named at {server}/v1"


@pytest.mark.parametrize("key", ["secret\r", "secret\n", " secret "])
def test_a_key_may_end_with_the_line_break_of_its_file(key: str, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorded, "key", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert RemoteModel(server, "named").reply([{"role": "user", "content": "Hello"}], {}, list[str]().append).tokens == 7


@pytest.mark.parametrize("key", ["sec\r\nret", "sec\u20acret", "sec\x1bret"])
def test_a_key_that_cannot_be_sent_is_not_shown(key: str, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood in a traceback."""
    monkeypatch.setenv("OPENAI_API_KEY", key)
    bench = Namespace(header=[], api_key=key)
    for use in (lambda: RemoteModel(server), lambda: attach(server, 1.0, None, key, print), lambda: headers(bench)):
        with pytest.raises(ConfigError, match=r"^the API key must be printable ASCII characters$"):
            use()


@pytest.mark.parametrize("count", [10**400, 2**63, -7, True], ids=["10^400", "2^63", "-7", "True"])
def test_a_count_of_tokens_that_cannot_be_is_not_believed(count: int, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    event = {"choices": [], "usage": {"completion_tokens": count}}
    monkeypatch.setattr(Recorded, "tail", b"data: " + json.dumps(event).encode() + b"\n\n")
    reply = RemoteModel(server).reply([{"role": "user", "content": "Hello"}], {}, list[str]().append)
    assert reply.tokens == 7 and (reply.rate is None or reply.rate > 0)


def test_a_stream_that_ends_in_an_error(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorded, "tail", b'data: {"error": {"message": "the engine is restarting"}}\n\n')
    parts: list[str] = []
    with pytest.raises(RequestError, match="the engine is restarting"):
        RemoteModel(server).reply([{"role": "user", "content": "Hello"}], {}, parts.append)
    assert parts == ["Good ", "day"]


@pytest.mark.parametrize(("tail", "says"), [
    *((b'data: {"choices": %b}\n\n' % odd, "an event that is no part of a chat") for odd in (b"5", b"[7]", b'[{"delta": 7}]')),
    (b"data: " + b"x" * 200_000, "the answer broke off: an event has"),
    (b"data: " + DEEP + b"\n\n", "the answer broke off: its JSON is too deep"),
])
def test_other_servers_may_send_anything(server: str, monkeypatch: pytest.MonkeyPatch, tail: bytes, says: str) -> None:
    monkeypatch.setattr("ridgeline.cli.chat.remote_model._MOST_LINE", 100_000)
    monkeypatch.setattr(Recorded, "tail", tail)
    with pytest.raises(RequestError, match=says):
        RemoteModel(server).reply([{"role": "user", "content": "Hello"}], {}, list[str]().append)


def test_an_error_that_is_too_deep_to_read(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorded, "error", DEEP)
    with pytest.raises(RequestError, match="/v1/chat/completions answered with status 400"):
        RemoteModel(server).reply([{"role": "user", "content": "bad"}], {}, list[str]().append)


@pytest.mark.parametrize("models", [DEEP, b"5", b"no", b'{"data": [{"id": "tiny"}]' + b" " * 100_000 + b"}"])
def test_a_list_of_models_may_be_anything_and_has_a_bound(server: str, monkeypatch: pytest.MonkeyPatch, models: bytes) -> None:
    monkeypatch.setattr("ridgeline.cli.chat.remote_model._MOST_LINE", 100_000)
    monkeypatch.setattr(Recorded, "models", models)
    with pytest.raises(ConfigError, match="/v1/models lists no model; name it"):
        RemoteModel(server)


@pytest.mark.parametrize("listed", [b"x" * 5_000, b"[" * 100_000, b'{"data": [5]}'])
def test_a_list_of_models_that_is_none(server: str, monkeypatch: pytest.MonkeyPatch, listed: bytes) -> None:
    read: list[int] = []

    def answer(self: Recorded) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(listed)

    whole = http.client.HTTPResponse.read

    def counted(self: http.client.HTTPResponse, amount: int | None = None) -> bytes:
        read.append(-1 if amount is None else amount)
        return whole(self, amount)

    monkeypatch.setattr(Recorded, "do_GET", answer)
    monkeypatch.setattr(http.client.HTTPResponse, "read", counted)
    with pytest.raises(ConfigError, match="lists no model"):
        RemoteModel(server)
    assert min(read) > 0                                 # no read to an end that may not come


def test_half_a_surrogate_pair_is_printed_as_a_mark(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorded, "tail", b'data: {"usage": 5, "choices": [{"delta": {"content": "\\ud83d!"}}]}\n\n')
    parts: list[str] = []
    RemoteModel(server).reply([{"role": "user", "content": "Hello"}], {}, parts.append)
    assert parts == ["Good ", "day", "?!"]


@pytest.mark.parametrize(
    ("url", "says"),
    [*((url, "--url must be like http") for url in ("ftp://x", "http://[::1", "http://x:y", "http://x:99999")),
     ("http://127.0.0.1:9", "no server answers at http://127.0.0.1:9/v1: "),
     ("http://a..b:9", "no server answers at http://a..b:9/v1: ")]
)
def test_no_server(url: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", url]) == 2 and says in capsys.readouterr().err
