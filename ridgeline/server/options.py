"""The options of `ridgeline serve` that concern the server; the engine's are in ridgeline/config."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.config import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0: any free one", low=0)
    allowed_host: str = option("", "further host names and addresses that this server answers to, separated by commas; *: any")
    served_model_name: str = option(
        "", "name of the model in requests and answers, and aliases, separated by commas; gpt-*: any name that begins with gpt-; "
        "empty: the file's name",
    )
    require_quality: str = option(
        "", "refuse a model without a quality card, or whose card exceeds limits like kl:0.02,flips:1% (docs/quantize.md)"
    )
    root_path: str = option("", "prefix of the paths behind a reverse proxy, like /llm, whether the proxy removes it or not")
    max_connections: int = option(4096, "largest number of open connections, including idle ones", low=1)
    max_queued_requests: int | None = option(
        None, "largest number of answers that run or wait; if not set: 4 × max_num_seqs", low=1
    )
    max_queued_tokens: int = option(1_000_000, "largest number of prompt tokens that wait", low=1)
    request_timeout: int = option(600, "seconds that a request may take, including its wait; 0: no limit", low=0)
    tool_call_parser: str = option(
        "auto", "format in which the model writes tool calls; auto: as in its chat template",
        (
            "auto", "none", "hermes", "llama3_json", "mistral", "pythonic", "harmony", "deepseek_v3", "kimi_k2", "qwen3_coder",
            "seed_oss", "minimax_m2", "dots", "glm45", "granite", "phi4_mini_json", "hunyuan_a13b", "nemotron_json",
            "cohere_command", "apertus", "olmo3", "functiongemma", "xlam", "minicpm3", "llama4_pythonic",
            "functionary_v3_1", "functionary_v3_2", "command_r", "glm4",
        ),
    )
    reasoning_parser: str = option(
        "auto", "marks of the reasoning before an answer; think: <think>…</think>; auto: those that the chat template contains",
        ("auto", "none", "think", "seed_oss", "mistral", "cohere_command", "granite", "hunyuan_a13b"),
    )
    strict_messages: bool = option(False, "refuse unknown fields inside messages by name; otherwise they are ignored, as in vLLM")
    enable_force_include_usage: bool = option(False, "send the usage in every event of a stream, whether asked for or not")
    max_body_bytes: int = option(16 * 2**20, "largest request body in bytes", low=1)
    max_stored_responses: int = option(
        1000, "answers of /v1/responses kept in memory for an hour, for previous_response_id; 0: none", low=0
    )
    max_stored_bytes: int = option(64 * 2**20, "largest total size of the stored answers in bytes", low=0)
    drain_timeout: int = option(30, "seconds that running requests get to finish when the server stops", low=0)
    max_engine_restarts: int = option(3, "largest number of restarts of a dead or hung engine within ten minutes", low=0)
    engine_timeout: int = option(
        60, "seconds without a finished step after which a busy engine counts as hung; 0: no limit", low=0
    )
    api_key_file: str = option("", "file with API keys, one per line; RIDGELINE_API_KEY holds keys too, separated by commas")
    api_key: str = option("", "API keys, separated by commas; other users of the machine can read them in the process list")
    insecure_no_auth: bool = option(False, "allow listening on a public address without API keys")
    allowed_origins: str = option("", "origins whose web pages may use this server, separated by commas; *: all")
    ssl_certfile: str = option("", "certificate chain (PEM) for HTTPS; needs ssl_keyfile")
    ssl_keyfile: str = option("", "private key (PEM) for HTTPS; needs ssl_certfile")
    admin_socket: str = option("", "path of a unix socket for `ridgeline admin`, for this user only; empty: none")
    otlp_traces_endpoint: str = option(
        "", "OpenTelemetry collector for traces, like http://localhost:4318/v1/traces; empty: by the OTEL_* variables, or none"
    )
    access_log: str = option("", "file for one line of JSON per request, without prompts or keys; -: stderr")

    def __post_init__(self) -> None:
        if self.host.startswith("[") and self.host.endswith("]"):
            object.__setattr__(self, "host", self.host[1:-1])    # an IPv6 address as URLs have it
