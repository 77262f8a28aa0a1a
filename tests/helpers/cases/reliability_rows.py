"""What Ridgeline promises of reliability and security, row by row.

A test that keeps a promise carries its name: `@pytest.mark.reliability("S-01")`. Names that differ only in the last letter
are parts of one row. `scripts/make_reliability_page.py` writes docs/reliability.md from this file and the markers.
"""

from __future__ import annotations

# Rows whose quick tests `make test-reliability` runs, in five minutes at most.
EVERY_COMMIT = {
    "S-01", "S-02", "S-03", "S-04", "S-05", "S-11", "H-01", "H-03", "R-01", "R-05", "P-01", "P-02", "P-03", "P-05", "P-12",
}
# The headings of the page, by the first letter of their rows.
SECTIONS = {
    "S": "Security", "H": "HTTP", "B": "Behaviour under stress and faults", "C": "Complaints about others, tried here",
    "R": "Failure and lifecycle", "P": "Correctness",
}
PROMISES = {
    "S-01": "no pickle, eval, exec, torch.load, shell or second template environment in the package",
    "S-01b": "nor in the built wheel",
    "S-02": "mutated frames between processes raise DecodeError and nothing else",
    "S-02b": "200,000 mutated frames, memory below twice the frame limit",
    "S-03": "one TCP listener, on 127.0.0.1; sockets in a folder of mode 0700",
    "S-04": "no way around the key: every route × 20 tricks with paths, hosts, queries and headers",
    "S-04b": "an unknown name in `Host` is refused",
    "S-05": "every key is compared, whatever was found before",
    "S-05b": "25 times 20,000 wrong keys that share 0 to 31 bytes: all 32 medians within 50 ns, mean rank correlation with "
    "the shared bytes below 0.2; a comparison that stops early would be seen",
    "S-06": "other salts and keys find no cached block",
    "S-06b": "time to first token reveals nothing of other tenants' prompts: area under the curve 0.5 ± 0.1 over 200 "
    "trials",
    "S-06c": "stored responses belong to their key, and are bounded in number, bytes and time",
    "S-07": "forced hash collisions, 10,000 prompts: no wrong reuse",
    "S-08": "chat templates cannot reach Python; expensive ones are refused within 2 s",
    "S-08b": "text in a message, a tool or a variable that is spelt like a special token stays text",
    "S-09": "hostile grammars: each within 2.5 s, compiled in a process of its own at low priority",
    "S-09b": "a grammar whose client disconnected is not compiled in the engine",
    "S-09c": "a grammar whose masks repeatedly take more than 0.1 s of a step fails alone, or is slow alone: 64 answers beside "
    "others, whose steps are short again afterwards",
    "S-09d": "200 generated grammars, memory below +300 MB",
    "S-09e": "compiling of long grammars, and trying of new ones, is limited while requests generate; a grammar that would "
    "wait too long is refused for now",
    "S-09f": "hundreds of small grammars at once are all compiled, and wait for one long grammar at most",
    "S-09g": "p99 of other requests below +20 % while hostile grammars arrive as fast as they are answered, in equal turns "
    "with and without them",
    "S-09h": "a stream beside one or four answers whose masks are never filled has a token in every step; tokens are the same "
    "however masks are filled",
    "S-10": "damaged GGUF files are refused by name, without a crash",
    "S-10b": "damaged safetensors files are refused by name",
    "S-10c": "300 mutated safetensors files and 300 mutated configs",
    "S-10d": "configs, tokenizer files and texts that would hang or swell a start or a request: refused before any work; "
    "panics of the library in one line; damaged files of the cache are not used",
    "S-11": "over 100 different errors: no path, address, traceback or prompt in any",
    "S-12": "schemathesis on the OpenAPI document, 200 examples an operation, positive and negative: no 5xx, no answer "
    "that contradicts the document",

    "H-01": "headers, bodies and URLs that are too large, and bytes that are not HTTP: 4xx and the connection closed",
    "H-01b": "64 MB header, 200,000 headers, 300 MB body, 100,000 chunks, depth 100,000 …: answered within 1 s, at most 32 "
    "MB kept",
    "H-01c": "memory of a request, answered, refused or left by its client, is freed at once: no cycles",
    "H-01d": "a connection has few requests in line, whatever its client sends",
    "H-01e": "a body with too many values is refused before it is decoded",
    "H-02": "connections of clients that send slowly are closed",
    "H-02b": "2,000 slow clients, a byte every 5 s: closed ≤ 15 s (headers) and ≤ 30 s (bodies) after they began, p99 of "
    "others ≤ 200 ms",
    "H-02c": "a body that is not complete holds no slot; one that stops for 3 s, or is too slow to end in time, gives its memory "
    "to others, one that arrives never; one that waits for memory for 60 s is refused",
    "H-03": "44 ambiguous requests (request smuggling): 400 and closed",
    "H-03b": "a router sends its replicas one request for each of a client's: no path writes a line of it or leaves "
    "`/v1/models`, and of two answers the client gets the first",
    "H-04": "1,000 streams × 64 tokens, three times: no errors, ≥ 20,000 events/s, p99 of the first byte ≤ 1 s",
    "H-05": "5,000 idle and 200 active connections: ≤ 300 MB, p99 < 2 ×",
    "H-06": "a client that does not read its answer delays no other request, and is disconnected",
    "H-06b": "200 clients that read 1 KB/s beside 50 others: p99 between tokens < +25 % (medians of five rounds each), "
    "memory < +64 MB, all disconnected 58 to 63 s after their buffers were full",
    "H-07": "a full queue: 429 with the predicted wait",
    "H-07b": "500 requests/s for 60 s where 250 can be served: ≥ 90 % of these, refusals are 429 or 503 with `Retry-After` "
    "1 to 60 within 50 ms (p99), queue within its limit in ten samples a second",
    "H-08": "the openai and anthropic clients: streams, tools, schemas, logprobs, n, errors",
    "H-08b": "the examples of their READMEs, as they are written",
    "H-08c": "the embedded model through the openai and anthropic packages, httpx and curl: whole, streamed, tools, "
    "json_schema, logprobs, n, all read the same; refused clients of both packages retry after `Retry-After`",
    "H-08d": "the examples of their source distributions",
    "H-08e": "HTTP/1.0, pipelining, 100-continue, one-byte chunks; nulls, whole numbers as floats",
    "H-08f": "clients written for vLLM, lm-eval's requests",

    "B-01": "body, URL or headers too large: 413, 414, 431",
    "B-02": "a prompt that is too long: 400 with its length and the limit; not tokenised if its bytes are already too "
    "many",
    "B-03": "`n`, log-probabilities, stop strings beyond their limits: 400 with field and limit",
    "B-04": "grammars are limited in size, depth and time",
    "B-05": "a full queue: 429 at once, `Retry-After` is the predicted wait",
    "B-06": "waiting prompt tokens are limited",
    "B-07": "connections are limited",
    "B-08": "a deadline for the first token that cannot be met: refused at once",
    "B-09": "a client that disconnects: aborted before another step, its blocks free, counted",
    "B-10": "a slow reader has a bounded buffer and delays no other",
    "B-11": "a request that takes too long: 504",
    "B-11b": "the same over HTTP, streamed or not",
    "B-12": "SIGTERM: no new requests, streams finish or time out, code 0",
    "B-13": "an engine that dies: `/health` 503, `/health/live` 200, another starts",
    "B-14": "an engine that hangs: detected by its steps, stacks in the log, restarted; a busy or an idle one is not",
    "B-15": "restarts are bounded, with pauses; a request that ends every engine is dropped",
    "B-16": "requests without an answer are queued again after a restart",
    "B-17": "greedy and seeded streams resume exactly",
    "B-18": "no further engine: every open request gets an error, in a stream as an event",
    "B-18b": "the server reports it and ends",
    "B-19": "a request that fails inside the engine fails alone",
    "B-20": "API keys: from environment or file, several, compared in constant time, every route except health",
    "B-21": "TLS",
    "B-21b": "requests and streams over TLS",
    "B-22": "CORS is off unless origins are named; only this machine by default",
    "B-23": "no secrets and no prompts in logs and errors; `X-Request-Id` is echoed",
    "B-24": "one front end holds 2,000 streams at 20,000 tokens/s and does not slow the engine",
    "B-25": "after all of it every block is free or cached",

    "C-01": "vLLM 53269: a call cut by max_tokens is reported as finished, in streams",
    "C-02": "vLLM 53255: `finish_reason` is `tool_calls`, but there are none",
    "C-03": "vLLM 19650, 27572, 35705: chunks without `finish_reason`, a last one without a reason, or, in chats, with "
    "other content",
    "C-04": "vLLM 18412: streamed calls without ids",
    "C-05": "vLLM 18108: streamed calls differ from whole ones",
    "C-06": "vLLM 57998, 24184, 30223: cut responses whose items are `completed`, whose stream ends as if whole, or "
    "without output",
    "C-07": "vLLM 43995, 47761: a conversation with a malformed call is refused from then on",
    "C-08": "vLLM 3145, 2706, 47815: `echo` with token ids fails, and its offsets are wrong in streams",
    "C-09": "vLLM 2577, 3572, 3574: stop strings that end inside a token, or whose beginning is shown",
    "C-10": "vLLM 19862: null for a field is a server error",
    "C-11": "vLLM 10806, 54947: the answer of a disconnected client is still computed",
    "C-12": "vLLM 55324: no `stop_sequence` in the stream of a message",
    "C-13": "vLLM 23363: no cached and reasoning tokens in a response's usage",
    "C-14": "vLLM 49181: 200 for an answer that failed",
    "C-15": "vLLM 44576: Claude Code does not work",

    "R-01": "blocks of clients that disconnect are freed, streaming or not, also with n > 1",
    "R-01b": "in steps: the engine gets the abort before another step, and computes at most the current one",
    "R-01c": "500 + 200 + 50 of them: nothing is left",
    "R-02": "the engine is killed: streams resume exactly, nothing is sent twice",
    "R-02b": "20 times under 64 streams: greedy and seeded ones equal the uninterrupted ones, tokens resume within 5 s and "
    "the loading time, no process, socket or shared memory is left",
    "R-02c": "an engine that cannot restart: every open request gets an error",
    "R-03": "the engine hangs: detected, its stacks logged, restarted",
    "R-04": "busy is not hung: a prompt of 8,000 tokens, idle times",
    "R-04b": "60 s of prompts of 8,000 tokens in steps of 0.1 s with an engine timeout of 2 s, `/health/ready` asked every "
    "second: no false alarm",
    "R-05": "SIGTERM and SIGINT under load and while loading, a second signal: in order, code 0, nothing left",
    "R-05b": "drain over TLS, with keys and timeouts",
    "R-06": "a fault at each of 15 sites, at the first and at later calls: one request fails or one engine is restarted",
    "R-07": "a poisoned row fails alone (NaN logits, a grammar that fails, a bad request)",
    "R-08": "a step that does not fit into memory, every 50 of 500 steps (slow: of 2,000) under preemptions and shared "
    "prefixes: no request fails, every answer is right",
    "R-08b": "a request that fits into no step fails alone; without any memory every request gets an error, and the engine "
    "lives",
    "R-09": "a port in use, a wrong setting: one line, code 2",
    "R-09b": "missing files and folders, offline, 64 file descriptors, a full disk",
    "R-10": "soak of 3 minutes after a warm-up: resident memory of every process surely below +1 MB/min, open files no "
    "more than before, p99 of the last third ≤ 1.2 × the first, nothing left, nothing failed",
    "R-11": "no time is measured with the wall clock",
    "R-11b": "60 s beside a busy process on every core, while front end and engine are stopped now and then for up to 5 s: "
    "no request fails or times out, always ready, the same engine",
    "R-11c": "a front end that was stopped itself does not call its engine hung",
    "R-12": "an engine that cannot be launched is tried again with a back-off, then the server ends with the reason; a restart "
    "keeps its KV cache and context where they fit; a kill for memory is named; an orphan ends",
    "R-13": "a template renderer or grammar compiler that stops or dies: 503 with `Retry-After` by its deadline, never the "
    "client's mistake, and the next request is served; a reader of long bodies that was stopped is replaced, and its body read",
    "R-14": "a start without standard streams, with few files or little memory, on a full disk: one line and code 2, or it "
    "works; an access log on a full disk says so once",
    "R-20": "text and tool calls are parsed in linear time",
    "R-20b": "prompts, stop strings, biases, tools, messages: twice the size, at most 2.3 × the CPU time",
    "R-20c": "text that a grammar fixes (const, choice, enum, literal, pattern): twice the length, at most 2.3 × the CPU "
    "time of a mask, however it is spelled",

    "P-01": "blocks against a naive model",
    "P-01b": "200 runs of 5,000 operations of each of the two models, compared after every one",
    "P-02": "the scheduler against a reference: budgets, no double scheduling, nothing lost, every request ends",
    "P-02b": "2,000 random traces",
    "P-03": "all interleavings of three requests: 568 of seven events (slow: 1,254 of eight)",
    "P-03b": "135,219 of eighteen events on four blocks, planned a step ahead; 13,608 of twelve events on five, planned "
    "ahead or not",
    "P-04": "no request starves",
    "P-05": "streamed = whole = offline",
    "P-05b": "streamed = whole = offline = batched, 50 prompts × 32 tokens of the embedded model: texts and ids exactly, "
    "log-probabilities ≤ 1e-4",
    "P-06": "the logits of transformers, every family, tiny and random, in float32 and float64; the embedded model knows "
    "Paris",
    "P-06b": "the embedded model against transformers on the same file, float32: 20 prompts of up to 128 tokens and 32 "
    "tokens after each, every logit within 2e-3, as prompts and as decode steps; 20 × 32 greedy ids",
    "P-07": "chunks, block sizes, prefix caching, preemption, alone and in pairs: the same tokens",
    "P-08": "an answer does not depend on its batch",
    "P-08b": "the embedded model, one request alone and in batches of 2 to 32: log-probabilities bitwise equal, with GEMMs "
    "that do not depend on the number of rows",
    "P-08c": "the same with the GEMMs of the CPU's BLAS: ids equal, log-probabilities ≤ 1e-4",
    "P-09": "seeds: alone, in a batch, after preemption; samples follow the distribution",
    "P-10": "perplexity of the embedded model on the first 8,192 tokens of three novels, windows of 512: within 0.1 % of "
    "transformers",
    "P-11": "structured output, 122 schemas, a model of noise: every answer valid for its schema",
    "P-11b": "over 300 schemas, including parameters of tools: every answer valid, no dead end",
    "P-12": "text in pieces = text as a whole; no half character, no stop string",
    "P-13": "kernels against their definitions, in the interpreter",
    "P-14": "stamped KV slots under random traffic: every visible slot carries its own prefix",
    "P-16": "planted bugs are caught",
}
