// The chat box: streams from /v1/chat/completions, and says how fast the answer came.
"use strict";

const chat = { messages: [], running: null };

function say(role, text = "") {
  const line = document.createElement("div"), words = document.createElement("span"), note = document.createElement("small");
  line.className = `said ${role}`;
  words.textContent = text;
  line.append(words, note);
  at("chat-log").append(line);
  at("chat-log").scrollTop = at("chat-log").scrollHeight;
  return { line, words, note };
}

// The data of server-sent events, one by one, until [DONE].
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line.slice(6).trim() === "[DONE]") return;
      yield JSON.parse(line.slice(6));
    }
  }
}

async function answer(shown) {
  const began = performance.now();
  const body = {
    model: page.last ? page.last.model : undefined, messages: chat.messages, stream: true, stream_options: { include_usage: true },
    max_tokens: Number(at("chat-max").value) || 256, temperature: Number(at("chat-temperature").value),
  };
  const reply = await fetch("v1/chat/completions", {
    method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body), signal: chat.running.signal,
  });
  if (!reply.ok) {
    if (reply.status === 401) askForKey(true);
    const failed = await reply.json().catch(() => null);
    throw new Error(failed && failed.error ? failed.error.message : `HTTP ${reply.status}`);
  }
  let first = 0, tokens = 0, text = "";
  for await (const event of events(reply.body)) {
    if (event.error) throw new Error(event.error.message);
    const piece = event.choices && event.choices.length ? event.choices[0].delta.content || "" : "";
    if (piece) {
      first = first || performance.now();
      text += piece;
      shown.words.textContent = text;
      at("chat-log").scrollTop = at("chat-log").scrollHeight;
    }
    if (event.usage) tokens = event.usage.completion_tokens;
  }
  const ended = performance.now();
  if (first) {
    const rate = tokens > 1 ? `, ${amount(((tokens - 1) * 1000) / Math.max(1, ended - first))} tok/s` : "";
    shown.note.textContent = `${tokens} tokens, first after ${seconds((first - began) / 1000)}${rate}`;
  }
  return text;
}

async function send() {
  const text = at("chat-input").value.trim();
  if (chat.running) return chat.running.abort();
  if (!text) return;
  at("chat-input").value = "";
  chat.messages.push({ role: "user", content: text });
  say("user", text);
  const shown = say("assistant", "");
  chat.running = new AbortController();
  at("chat-send").textContent = "Stop";
  try {
    chat.messages.push({ role: "assistant", content: await answer(shown) });
  } catch (error) {
    const said = shown.words.textContent;
    if (error.name === "AbortError" && said) {
      chat.messages.push({ role: "assistant", content: said });
      shown.note.textContent = "stopped";
    } else {
      chat.messages.pop();
      shown.line.remove();
      if (error.name !== "AbortError") say("error", error.message);
    }
  }
  chat.running = null;
  at("chat-send").textContent = "Send";
}

at("chat-form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("chat-input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
at("chat-clear").addEventListener("click", () => {
  if (chat.running) chat.running.abort();
  chat.messages = [];
  at("chat-log").replaceChildren();
});
