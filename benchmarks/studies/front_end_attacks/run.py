"""Attacks on the front end of a running server: what each costs in memory, and how long /health and another stream wait.

    python benchmarks/studies/front_end_attacks/run.py --out result.json
    python benchmarks/studies/front_end_attacks/run.py --only pipelined stored --megabytes 1000
    python benchmarks/studies/front_end_attacks/run.py --before route        # or replicas

The server is `ridgeline serve` with a tiny random Llama (2 layers, hidden size 64) and the embedded model's tokenizer, so that
the front end is the bottleneck. `--before route` attacks a `ridgeline route` in front of it, `--before replicas` a server with
`--data-parallel-size 2`. Clients and probes run on the same machine. For each attack the table has the front end's resident
memory before, at most, and 5 s after the last byte (0.3 s where the attack is on the event loop, not on memory), and the slowest
answers of `/health` meanwhile. `--only answers` measures a request for 128 answers, each with penalties, biases, filters or a
grammar, beside another stream. The last rows are chats beside long requests, the memory 5 s after all of it, and the seconds from
SIGTERM to the end of the process. Four minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
from probes import Probes, probe  # noqa: E402

KEY = "attack-key"
LIMIT = 16 * 2**20 - 1024            # bytes of a body: just below the server's limit
AFTER_SECONDS = 5.0
IN_LINE = 160                        # connections with pipelined requests at once
QUIET = "nothing, with a stream"     # the gaps of other rows are to be compared with this one's
JSON_TYPE = b"Content-Type: application/json\r\n"


# -- the server --------------------------------------------------------------------------------------------------------


def write_model(path: Path) -> list[str]:
    """A tiny Llama's config, and the options that give it the embedded model's vocabulary and chat template."""
    from ridgeline.process import embedded
    from ridgeline.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(embedded.require())
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": tokenizer.vocab_size, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "torch_dtype": "float32", "hidden_act": "silu", "eos_token_id": tokenizer.eos_token_id,
    }
    (path / "config.json").write_text(json.dumps(config))
    return ["--tokenizer", str(embedded.require())]


class Server:
    def __init__(
        self, log: Path, *command: str, script: tuple[str, ...] = ("-m", "ridgeline"), tree: Path = ROOT, **variables: str
    ) -> None:
        """`script`: what runs the command, from the checkout `tree`."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        environment = os.environ | {"RIDGELINE_API_KEY": KEY, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"} | variables
        whole = [sys.executable, *script, *command, "--port", str(self.port), "--drain-timeout", "2"]
        with log.open("ab") as file:
            # In a session of its own, as a service has it: Linux shares cores between sessions before it does within one.
            self.process = subprocess.Popen(whole, stdout=file, stderr=file, env=environment, start_new_session=True)
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.health(5.0) is not None:
                return
            time.sleep(0.2)
        self.process.kill()
        raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}")

    def connect(self, seconds: float = 120.0) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=seconds)

    def health(self, seconds: float) -> float | None:
        """Seconds until /health answered 200; None if it did not."""
        return probe(self.port, seconds)

    @property
    def memory(self) -> float:
        """The front end's resident memory in MB."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1000
        return 0.0

    def stop(self, number: int = signal.SIGTERM, seconds: float = 60.0) -> float:
        """Seconds until it was gone."""
        begin = time.monotonic()
        self.process.send_signal(number)
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        return time.monotonic() - begin


def started(before: str, folder: Path) -> list[Server]:
    """What is attacked first, then what it needs."""
    log, options = folder / "log", ["--load-format", "dummy", "--served-model-name", "tiny"]
    replicas = ["--data-parallel-size", "2", "--kv-cache-memory-bytes", str(2**29)] if before == "replicas" else []
    server = Server(log, "serve", str(folder), *options, *write_model(folder), *replicas)
    if before != "route":
        return [server]
    return [Server(log, "route", f"http://127.0.0.1:{server.port}", RIDGELINE_ROUTE_KEY=KEY), server]


class Memory:
    """The most memory while something runs."""

    def __init__(self, server: Server) -> None:
        self.most = server.memory
        self._server = server
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            self.most = max(self.most, self._server.memory)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


# -- bodies ------------------------------------------------------------------------------------------------------------


def filled(before: str, item: str, after: str, size: int = LIMIT) -> bytes:
    """JSON of about `size` bytes: `item` as often as it fits, with # replaced by a number."""
    width = len(item.replace("#", "1234567")) + 1
    count = (size - len(before) - len(after)) // width
    items = ",".join(item.replace("#", f"{n:07d}") for n in range(count)) if "#" in item else ",".join([item] * count)
    return (before + items + after).encode()


CHAT = '"model":"tiny","max_tokens":1'
ONE = f'{{{CHAT},"messages":[{{"role":"user","content":"a"}}]'
TEXT = '"' + "x" * (LIMIT - 400) + '"'

# name: (path, body)
LARGE: dict[str, Callable[[], tuple[str, bytes]]] = {
    "kwargs of lists": lambda: ("chat/completions", filled(ONE + ',"chat_template_kwargs":{"x":[', "[]", "]}}")),
    "kwargs of keys": lambda: ("chat/completions", filled(ONE + ',"chat_template_kwargs":{', '"#":""', "}}")),
    "kwargs of text": lambda: ("chat/completions", f'{ONE},"chat_template_kwargs":{{"x":{TEXT}}}}}'.encode()),
    "messages": lambda: ("chat/completions", filled(f'{{{CHAT},"messages":[', '{"role":"user","content":"a"}', "]}")),
    "18,000 messages": lambda: (
        "chat/completions", filled(f'{{{CHAT},"messages":[', '{"role":"user","content":"a"}', "]}", 18_000 * 30)),
    "tools": lambda: ("chat/completions", filled(
        ONE + ',"tools":[', '{"type":"function","function":{"name":"f#","parameters":{"type":"object"}}}', "]}")),
    "schema": lambda: ("chat/completions", filled(
        ONE + ',"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"type":"object","properties":{',
        '"#":{"type":"string"}', "}}}}}")),
    "metadata": lambda: ("chat/completions", filled(ONE + ',"stream":true,"metadata":{', '"#":""', "}}")),
    "metadata of text": lambda: ("chat/completions", f'{ONE},"stream":true,"metadata":{{"a":{TEXT}}}}}'.encode()),
    "response_format of lists": lambda: ("chat/completions", filled(ONE + ',"response_format":[', "[]", "]}")),
    "response metadata": lambda: ("responses", filled('{"model":"tiny","input":"a","metadata":{', '"#":""', "}}")),
    "response input": lambda: (
        "responses", filled('{"model":"tiny","max_output_tokens":1,"input":[', '{"role":"user","content":"a"}', "]}")),
    "response instructions": lambda: (
        "responses", f'{{"model":"tiny","max_output_tokens":1,"input":"a","instructions":{TEXT}}}'.encode()),
    "turns": lambda: ("messages", filled(f'{{{CHAT},"messages":[', '{"role":"user","content":"' + "x" * 30 + '"}', "]}")),
    "blocks": lambda: ("messages", filled(
        f'{{{CHAT},"messages":[{{"role":"user","content":[', '{"type":"text","text":"x"}', "]}]}")),
    "prompts": lambda: ("completions", filled('{"model":"tiny","prompt":[', '"a"', "]}")),
    "prompt of ids": lambda: ("completions", filled('{"model":"tiny","prompt":[', "1", "]}")),
    "390,000 ids": lambda: ("completions", filled('{"model":"tiny","prompt":[', "1234", "]}", 390_000 * 5)),
    "prompt of text": lambda: ("completions", f'{{"model":"tiny","prompt":{TEXT}}}'.encode()),
    "escapes": lambda: (
        "completions", b'{"model":"tiny","prompt":"' + b'\\"\\\\,[' * ((LIMIT - 100) // 6) + b'"}'),
    "embeddings of lists": lambda: ("embeddings", filled('{"model":"tiny","input":[', "[]", "]}")),
    "detokenize": lambda: ("/detokenize", filled('{"tokens":[', "1", "]}")),
    "100,000 to detokenize": lambda: ("/detokenize", filled('{"tokens":[', "1000", "]}", 500_000)),
    "tokenize": lambda: ("/tokenize", b'{"return_token_strs":true,"prompt":"' + b"a b " * 150_000 + b'"}'),
    "prompt logprobs": lambda: ("completions", filled(
        '{"model":"tiny","max_tokens":1,"prompt_logprobs":20,"prompt":[', "1000", "]}", 1_500 * 5)),
    "128 echoes with log-probabilities": lambda: ("completions", filled(
        '{"model":"tiny","max_tokens":2,"n":128,"echo":true,"logprobs":1,"stream":true,"prompt":[', "1000", "]}", 8_000 * 5)),
    "16 choices with prompt logprobs": lambda: ("completions", filled(
        '{"model":"tiny","max_tokens":2,"n":16,"prompt_logprobs":20,"stream":true,"prompt":[', "1000", "]}", 8_000 * 5)),
    "tools of a response": lambda: ("responses", filled(
        '{"model":"tiny","max_output_tokens":2,"input":"a","tool_choice":"none","stream":true,"tools":[',
        '{"type":"function","name":"f#","description":"' + "x" * 140_000 + '","parameters":{"type":"object"}}', "]}")),
    "llama.cpp's response_fields": lambda: ("/completion", filled(
        '{"n_predict":1,"prompt":[' + ",".join(['"a"'] * 200) + '],"response_fields":[', '"a/#"', "]}", 90_000 * 11)),
    "llama.cpp's prompt in 128 answers": lambda: ("/completion", filled(
        '{"n_predict":2,"n_cmpl":128,"stream":true,"prompt":[', "45855", "]}", 8_000 * 6)),     # a token of 80 characters
    "128 chats with echo": lambda: ("chat/completions", (
        '{"model":"tiny","max_tokens":2,"n":128,"echo":true,"continue_final_message":true,"add_generation_prompt":false,"messages":'
        '[{"role":"user","content":"a"},{"role":"assistant","content":"' + "#" * 480_000 + '"}]}').encode()),
    "spelt special tokens": lambda: (
        "chat/completions", f'{{{CHAT},"messages":[{{"role":"user","content":"{"<|im_end|>" * 90_000}"}}]}}'.encode()),
    "few special tokens": lambda: (
        "chat/completions", f'{{{CHAT},"messages":[{{"role":"user","content":"{"<|im_end|>" * 6_000}"}}]}}'.encode()),
    "allowed ids": lambda: (
        "completions", filled('{"model":"tiny","prompt":"a","max_tokens":1,"allowed_token_ids":[', "12345", "]}", 390_000 * 6)),
    "Ollama's messages": lambda: ("/api/chat", filled('{"model":"tiny","messages":[', '{"role":"user","content":"a"}', "]}")),
    "Ollama's show": lambda: ("/api/show", filled('{"model":"tiny","options":{', '"#":""', "}}")),
    "llama.cpp's biases": lambda: (
        "/completion", filled('{"n_predict":1,"prompt":"a","logit_bias":[', '["some words",1.5]', "]}", 4_000 * 19)),
    "embeddings": lambda: ("embeddings", filled('{"model":"tiny","input":[', '"' + "word " * 60 + '"', "]}", 1_000 * 303)),
    "batch": lambda: (
        "chat/completions/batch", filled(f'{{{CHAT},"messages":[', '[{"role":"user","content":"a"}]', "]}", 5_000 * 32)),
    "invocations": lambda: ("/invocations", filled('{"model":"tiny","prompt":"a","metadata":{', '"#":""', "}}")),
    "one number": lambda: ("completions", b'{"model":"tiny","prompt":[' + b"9" * (LIMIT - 100) + b"]}"),
    "unknown fields": lambda: ("chat/completions", filled(ONE + ",", '"#":1', "}")),
    "unfinished": lambda: ("chat/completions", filled(ONE + ',"metadata":[', "[]", "")),
    "nested": lambda: ("chat/completions", ONE.encode() + b',"metadata":' + b"[" * (LIMIT - 200)),
}

MANY = ONE.replace('"max_tokens":1', '"max_tokens":48,"n":128,"ignore_eos":true')
PROPERTIES = '{"a":{"type":"string"},"b":{"type":"array","items":{"type":"integer"}}}'
SCHEMA = f'{{"type":"object","properties":{PROPERTIES},"required":["a","b"]}}'

# What each of 128 answers of one request does with its logits: fields of its body.
ANSWERS = {
    "nothing, greedy": '"temperature":0',
    "nothing, sampled": '"temperature":1',
    "top_p": '"temperature":1,"top_p":0.9',
    "min_p": '"temperature":1,"min_p":0.01',
    "typical_p": '"temperature":1,"typical_p":0.9',
    "presence_penalty": '"presence_penalty":0.5',
    "frequency_penalty": '"frequency_penalty":0.5',
    "repetition_penalty": '"repetition_penalty":1.2',
    "300 biases": '"logit_bias":{' + ",".join(f'"{100 + 7 * each}":1.5' for each in range(300)) + "}",
    "100 bad words": '"bad_words":[' + ",".join(f'"some words {each}"' for each in range(100)) + "]",
    "schema": '"response_format":{"type":"json_schema","json_schema":{"name":"s","schema":' + SCHEMA + "}}",
    "regex": '"structured_outputs":{"regex":"[a-z ]{200,400}"}',
    "26 stop strings kept open": '"allowed_token_ids":[45855],"stop":['
        + ",".join(f'"{"#" * 1000}{chr(97 + each)}"' for each in range(26)) + "]",
    "20 log-probabilities": '"logprobs":true,"top_logprobs":20',
}


def posted(path: str, body: bytes) -> bytes:
    path = path if path.startswith("/") else f"/v1/{path}"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + JSON_TYPE + b"\r\n" + body


def ask(server: Server, request: bytes, seconds: float = 120.0) -> tuple[str, float]:
    """(status, seconds) of one request on a connection of its own."""
    begin = time.monotonic()
    try:
        with server.connect(seconds) as connection:
            connection.sendall(request.replace(b"\r\nHost", b"\r\nConnection: close\r\nHost", 1))
            got = connection.recv(65536)
            while len(more := connection.recv(65536)):
                got = got[:1000] + more[-1000:]
    except TimeoutError:
        return "none", time.monotonic() - begin
    except OSError:
        return "reset", time.monotonic() - begin
    return got[9:12].decode(), time.monotonic() - begin


# -- attacks: each sends about `size` bytes and returns what the server said -------------------------------------------


def pipelined(server: Server, size: int) -> str:
    """Requests in line whose answers are never read; no key."""
    line = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n" * 9000
    sent = 0
    while sent < size:
        connections = [server.connect() for _ in range(IN_LINE)]
        for connection in connections:
            connection.setblocking(False)
        deadline, left = time.monotonic() + 1.0, dict.fromkeys(connections, 0)
        while time.monotonic() < deadline and any(each < len(line) for each in left.values()):
            for connection, done in left.items():
                try:
                    left[connection] += connection.send(line[done : done + 2**16]) if done < len(line) else 0
                except BlockingIOError:
                    continue
                except OSError:
                    left[connection] = len(line)
            time.sleep(0.001)
        time.sleep(max(0.0, deadline - time.monotonic()))
        sent += IN_LINE * len(line)                           # what the server does not read counts: it was offered
        for connection in connections:
            connection.close()
    return f"{sent >> 20} MB offered"


def upgrades(server: Server, size: int) -> str:
    """Requests that ask for a websocket, each on a connection of its own."""
    request = b"GET /v1/x HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX: " + b"x" * 15_000 + b"\r\n\r\n"
    for _ in range(min(2000, size // len(request))):
        with server.connect() as connection:
            connection.sendall(request * 4)
    return "closed"


def repeated(name: str) -> Callable[[Server, int], str]:
    def attack(server: Server, size: int) -> str:
        request = posted(*LARGE[name]())
        said = [ask(server, request)[0] for _ in range(max(1, size // len(request)))]
        return " ".join(sorted(set(said)))

    return attack


def cut(name: str, part: float) -> Callable[[Server, int], str]:
    """Clients that leave after `part` of their body; with all of it, 0.2 s later."""

    def attack(server: Server, size: int) -> str:
        request = posted(*LARGE[name]())
        for _ in range(max(1, int(size / len(request) / part))):
            with server.connect() as connection:
                connection.sendall(request[: int(len(request) * part)])
                time.sleep(0.2 if part == 1 else 0)
        return "left"

    return attack


def unread(server: Server, size: int) -> str:
    """Large answers that clients do not read, on connections that stay for 3 s."""
    request = posted(*LARGE["tokenize"]())
    connections = []
    for _ in range(max(1, min(100, size // len(request)))):
        connections.append(server.connect())
        connections[-1].sendall(request)
    time.sleep(3)
    for connection in connections:
        connection.close()
    return f"{len(connections)} clients"


MEMORY: dict[str, Callable[[Server, int], str]] = {
    "nothing": lambda server, size: nothing(server, size),
    "pipelined": pipelined,
    "upgrades": upgrades,
    "streamed": repeated("metadata"),
    "streamed text": repeated("metadata of text"),
    "stored": repeated("response metadata"),
    "stored text": repeated("response instructions"),
    "errors": repeated("unknown fields"),
    "unfinished": repeated("unfinished"),
    "left midway": cut("metadata of text", 0.9),
    "left before the answer": cut("metadata of text", 1.0),
    "left while parsed": cut("turns", 1.0),
    "unread": unread,
}


def nothing(server: Server, size: int) -> str:
    """To compare with: what the machine's other work costs."""
    time.sleep(5)
    return "nothing sent"


def together(server: Server, request: bytes, count: int) -> str:
    """The same request from `count` clients at once."""
    said: list[str] = []
    threads = [threading.Thread(target=lambda: said.append(ask(server, request)[0])) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return " ".join(sorted(set(said)))


class OtherStream:
    """A stream that another client reads meanwhile, in a process of its own: the longest time between two of its events."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, __file__, "--stream", str(port)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._child.stdout is not None
        self._child.stdout.readline()                    # the stream has begun

    def end(self) -> float:
        return float(self._child.communicate()[0].split()[-1])


def stream_until_told(port: int) -> None:
    body = ONE.replace('"max_tokens":1', '"max_tokens":8000,"ignore_eos":true').encode() + b',"stream":true}'
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    longest = 0.0
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(posted("chat/completions", body))
        connection.recv(65536)
        print("begun", flush=True)
        last = time.monotonic()
        while not ended.is_set() and connection.recv(65536):
            now = time.monotonic()
            longest, last = max(longest, now - last), now
    print(longest)


# -- the table ---------------------------------------------------------------------------------------------------------


def measured(server: Server, name: str, attack: Callable[[], str], after: float, with_stream: bool = False) -> dict[str, Any]:
    before = server.memory
    stream = OtherStream(server.port) if with_stream else None
    probes, memory = Probes(server.port, server.process.pid), Memory(server)
    begin = time.monotonic()
    said = attack()
    seconds = time.monotonic() - begin
    time.sleep(after)
    left = server.memory
    memory.end()
    row: dict[str, Any] = {"attack": name, "said": said, "seconds": round(seconds, 1)}
    if stream is not None:
        row["stream_gap_ms"] = round(1000 * stream.end())
    times = [each["took"] for each in probes.end()]
    row |= {
        "rss_before_mb": round(before), "rss_most_mb": round(memory.most), "rss_after_mb": round(left),
        "health_probes": len(times), "health_p99_ms": round(times[int(0.99 * (len(times) - 1))]),
        "health_max_ms": round(times[-1]),
    }
    print_row(row)
    return row


COLUMNS = ("attack", "said", "seconds", "rss_before_mb", "rss_most_mb", "rss_after_mb", "health_p99_ms", "health_max_ms",
           "stream_gap_ms")


def print_row(row: dict[str, Any]) -> None:
    print("| " + " | ".join(str(row.get(name, "")) for name in COLUMNS) + " |", flush=True)


def beside_long_work(server: Server) -> list[dict[str, Any]]:
    """Six clients send long turns and leave; what small chats, chats with tools and longer prompts wait meanwhile."""
    turns = posted("messages", filled(f'{{{CHAT},"messages":[', '{"role":"user","content":"' + "x" * 30 + '"}', "]}", 5_000_000))
    connections = [server.connect() for _ in range(6)]
    for connection in connections:
        connection.sendall(turns)
    time.sleep(1)
    for connection in connections:
        connection.close()
    tool = ',"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}]}'
    letters = ONE.replace('"a"', f'"{"a " * 1500}"') + "}"
    chats = {"small chat": ONE + "}", "chat with a tool": ONE + tool, "prompt of 3,000 letters": letters}
    rows = []
    for name, body in chats.items():
        said, seconds = ask(server, posted("chat/completions", body.encode()), 60.0)
        rows.append({"attack": f"{name} beside six long requests", "said": said, "seconds": round(seconds, 2)})
        print_row(rows[-1])
    return rows


def stopped(server: Server) -> dict[str, Any]:
    """SIGTERM while six clients have long requests and forty have requests in line. The drain time is 2 s."""
    turns = posted("messages", filled(f'{{{CHAT},"messages":[', '{"role":"user","content":"' + "x" * 30 + '"}', "]}", 5_000_000))
    connections = [server.connect() for _ in range(46)]
    for connection in connections[:6]:
        connection.sendall(turns)
    for connection in connections[6:]:
        connection.sendall(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n" * 1000)
    time.sleep(0.5)
    seconds = server.stop()
    said = f"code {server.process.returncode}"
    row = {"attack": "SIGTERM beside them, drain time 2 s", "said": said, "seconds": round(seconds, 2)}
    print_row(row)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--before", choices=("serve", "replicas", "route"), default="serve", help="what is attacked")
    parser.add_argument("--megabytes", type=int, default=200, help="sent by each attack on memory")
    parser.add_argument("--seconds", type=float, default=210.0, help="after which no attack begins; the last rows take 25 s")
    parser.add_argument("--at-once", type=int, default=3, help="clients that send the same large body at once")
    parser.add_argument("--only", nargs="*", help="names of attacks, or memory, loop, answers, pool")
    parser.add_argument("--note", default="", help="what else ran on the machine")
    parser.add_argument("--stream", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stream:
        return stream_until_told(options.stream)
    from ridgeline.bench.lab.record import commit

    facts = {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(),
             "commit": commit(), "note": options.note, "load_average_before": os.getloadavg(), "megabytes": options.megabytes,
             "at_once": options.at_once, "before": options.before}
    rows = run_all(options)
    if options.out:
        facts["load_average_after"] = os.getloadavg()
        made_by = "benchmarks/studies/front_end_attacks/run.py"
        options.out.write_text(json.dumps({"made_by": made_by, **facts, "rows": rows}, indent=1) + "\n")


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    until = time.monotonic() + options.seconds

    def wanted(group: str, name: str = "") -> bool:
        if options.only and group not in options.only and name not in options.only:
            return False
        if group == "pool" or time.monotonic() < until:
            return True
        rows.append({"attack": name or group, "said": "left out: no time"})
        return False

    rows: list[dict[str, Any]] = []
    print_row({name: name for name in COLUMNS})
    print("|" + "---|" * len(COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        server, *needed = started(options.before, Path(folder))
        try:
            for name in ("first chat", "first long body"):   # these start the renderer and the reader
                body = ONE.encode() + b',"stop":"%b"}' % (b"x" * (2**19 if name == "first long body" else 1))
                ask(server, posted("chat/completions", body))
            first = server.memory
            for name, attack in MEMORY.items():
                if wanted("memory", name):
                    rows.append(measured(server, name, partial(attack, server, options.megabytes * 10**6), AFTER_SECONDS))
            for name in LARGE:
                if wanted("loop", name):
                    request = posted(*LARGE[name]())
                    rows.append(measured(server, name, partial(together, server, request, options.at_once), 0.3, True))
            if wanted("loop", QUIET) or wanted("answers", QUIET):
                rows.append(measured(server, QUIET, partial(nothing, server, 0), 0.3, True))
            for name, fields in ANSWERS.items():
                if wanted("answers", f"128 answers: {name}"):
                    request = posted("chat/completions", f"{MANY},{fields}}}".encode())
                    attack = partial(together, server, request, 1)
                    rows.append(measured(server, f"128 answers: {name}", attack, 0.3, True))
            if wanted("loop", QUIET) or wanted("answers", QUIET):        # again: other work may have begun or ended meanwhile
                rows.append(measured(server, QUIET, partial(nothing, server, 0), 0.3, True))
            if wanted("pool"):
                rows += beside_long_work(server)
            time.sleep(AFTER_SECONDS)
            last = {"attack": "all of it, since the start", "rss_before_mb": round(first), "rss_after_mb": round(server.memory)}
            rows.append(last)
            print_row(rows[-1])
            if wanted("pool"):
                rows.append(stopped(server))
        finally:
            for each in (server, *needed):
                if each.process.poll() is None:
                    each.stop()
            print(Path(folder, "log").read_text()[-2000:], file=sys.stderr)
    return rows


if __name__ == "__main__":
    main()
