"""Commands of vLLM, SGLang, llama.cpp, Ollama and the Hugging Face hub: what to type here instead."""

from __future__ import annotations

_SERVE = "use `ridgeline serve MODEL`"
_OFFLINE = "use `ridgeline bench offline MODEL`"
_SHOW = "`ridgeline list` has the models on this machine, and `ridgeline plan MODEL` the sizes of one"
_RENAME = "models stay in the Hugging Face cache; `ridgeline serve MODEL --served-model-name NAME` gives one another name"

INSTEAD = {
    "server": _SERVE, "launch": _SERVE, "launch_server": _SERVE, "launch-server": _SERVE, "api_server": _SERVE,
    "api-server": _SERVE, "llama-server": _SERVE, "start": _SERVE, "up": _SERVE,
    "cli": "use `ridgeline chat MODEL`", "llama-cli": "use `ridgeline chat MODEL`",
    "complete": "use `ridgeline generate` for a file of prompts, or POST /v1/completions of a server",
    "run-batch": "use `ridgeline generate IN.jsonl OUT.jsonl --model MODEL`",
    "batch": "use `ridgeline generate IN.jsonl OUT.jsonl --model MODEL`",
    "collect-env": "`ridgeline --version` has the version, and `ridgeline diagnose` what the machine can do",
    "check_env": "`ridgeline --version` has the version, and `ridgeline diagnose` what the machine can do",
    "profile": "use `ridgeline diagnose MODEL`, or `ridgeline admin SOCKET profile` for a running server",
    "trace": "use `ridgeline diagnose MODEL --trace FILE`",
    "bench latency": _OFFLINE, "bench throughput": _OFFLINE, "llama-bench": _OFFLINE, "bench_offline_throughput": _OFFLINE,
    "bench_one_batch": _OFFLINE, "bench_serving": "use `ridgeline bench serve URL`",
    "bench sweep": "every option of `ridgeline bench serve` that takes a list is a sweep",
    "benchmark": "use `ridgeline bench offline MODEL`, or `ridgeline bench serve URL` for a running server",
    "llama-perplexity": "use `ridgeline eval MODEL`", "perplexity": "use `ridgeline eval MODEL`",
    "llama-quantize": "use `ridgeline quantize`", "convert": "use `ridgeline quantize`",
    "router": "use `ridgeline route`", "launch_router": "use `ridgeline route`",
    "ps": "GET /v1/models of a running server has its model; `ridgeline list` has the models on this machine",
    "show": _SHOW, "info": _SHOW, "inspect": _SHOW, "models": "use `ridgeline list`", "cache": "use `ridgeline list`",
    "download": "use `ridgeline pull NAME`", "fetch": "use `ridgeline pull NAME`", "delete": "use `ridgeline rm NAME`",
    "create": "there are no Modelfiles: `ridgeline serve` has --chat-template and --override-generation-config instead",
    "cp": _RENAME, "push": "models cannot be uploaded; `hf upload` does that",
    "stop": "Ctrl-C or SIGTERM stops a server, which then frees its memory",
    "login": "set the variable HF_TOKEN for `ridgeline pull`", "signin": "set the variable HF_TOKEN for `ridgeline pull`",
    "env": "docs/options.md lists the environment variables", "update": "use pip, in a new clone: docs/operations.md",
}
