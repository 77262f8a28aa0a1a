// The chat: streams from /v1/chat/completions, renders Markdown, and says how fast the answer came. What was received is never lost.
"use strict";

const chat = { messages: [], running: null };

function openChat(wanted) {
  at("chat").hidden = !wanted;
  at("chat-open").setAttribute("aria-expanded", String(wanted));
  document.body.classList.toggle("chatting", wanted);
  if (page.last) show(page.last);                        // the board has another width now
  if (wanted) at("chat-input").focus({ preventScroll: true });
}

function say(role, text = "") {
  const line = made("div", undefined, `said ${role}`), words = made("div", role === "assistant" ? "" : text, "words");
  const foot = made("div", undefined, "foot"), note = made("small");
  foot.append(note);
  line.append(words, foot);
  at("chat-log").append(line);
  follow(true);
  return { line, words, foot, note, text, thoughts: "", due: 0, drawn: 0 };
}

// Scrolls along, unless the reader has scrolled up.
function follow(always = false) {
  const log = at("chat-log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

function draw(shown) {
  const began = performance.now(), blocks = rendered(parse(shown.text));
  if (shown.thoughts) {
    const thinking = made("details", undefined, "thinking");
    thinking.open = !shown.text;
    thinking.append(made("summary", "Reasoning"), made("p", shown.thoughts));
    blocks.unshift(thinking);
  }
  shown.words.replaceChildren(...blocks);
  follow();
  shown.due = 0;
  shown.drawn = performance.now() + 4 * (performance.now() - began);     // a long answer is drawn less often
}

function drawSoon(shown) {
  if (!shown.due) shown.due = setTimeout(() => draw(shown), Math.max(30, shown.drawn - performance.now()));
}

// The data of server-sent events, one by one, until [DONE]; an end without it is an error.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection ended early");
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

function question() {
  const system = at("chat-system").value.trim(), temperature = at("chat-temperature").value;
  return {
    model: page.last ? page.last.model : undefined, stream: true, stream_options: { include_usage: true },
    messages: [...(system ? [{ role: "system", content: system }] : []), ...chat.messages],
    max_tokens: Number(at("chat-max").value) || 512, ...(temperature === "" ? {} : { temperature: Number(temperature) }),
  };
}

async function answer(shown) {
  const began = performance.now();
  const reply = await fetch("v1/chat/completions", {
    method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(question()), signal: chat.running.signal,
  });
  if (!reply.ok) {
    if (reply.status === 401) askForKey(true);
    const failed = await reply.json().catch(() => null);
    throw new Error(failed && failed.error ? failed.error.message : `HTTP ${reply.status}`);
  }
  let first = 0, tokens = 0, cut = "";
  for await (const event of events(reply.body)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices && event.choices[0], delta = choice ? choice.delta : {};
    if (delta.content || delta.reasoning_content) {
      first = first || performance.now();
      shown.text += delta.content || "";
      shown.thoughts += delta.reasoning_content || "";
      drawSoon(shown);
    }
    if (choice && choice.finish_reason === "length") cut = "cut at max tokens; ";
    if (event.usage) tokens = event.usage.completion_tokens;
  }
  const lasted = performance.now() - first, rate = first && tokens > 1 ? `, ${amount(((tokens - 1) * 1000) / Math.max(1, lasted))} tok/s` : "";
  return `${cut}${counted(tokens, "token")}${first ? `, first after ${seconds((first - began) / 1000)}` : ""}${rate}`;
}

async function send() {
  const text = at("chat-input").value.trim();
  if (chat.running || !text) return;
  const talk = chat.messages;                            // Clear begins another one
  at("chat-input").value = "";
  talk.push({ role: "user", content: text });
  say("user", text);
  const shown = say("assistant");
  shown.note.textContent = "waiting for the first token";
  chat.running = new AbortController();
  at("chat-send").textContent = "Stop";
  at("chat-log").setAttribute("aria-busy", "true");      // read aloud when it is whole
  let failure = null;
  try {
    shown.note.textContent = await answer(shown);
  } catch (error) {
    failure = error;
  }
  clearTimeout(shown.due);
  draw(shown);
  if (shown.text) {
    talk.push({ role: "assistant", content: shown.text });
    shown.foot.prepend(copyButton(() => shown.text));
  }
  if (failure && !shown.text) talk.pop();
  if (failure) ended(shown, failure, text);
  chat.running = null;
  at("chat-send").textContent = "Send";
  at("chat-log").setAttribute("aria-busy", "false");
  follow();
}

// Stopped, or broken: what came until then stays, with what happened below it. A question without an answer can be sent again.
function ended(shown, failure, text) {
  const stopped = failure.name === "AbortError";
  if (shown.text || shown.thoughts) {
    shown.note.textContent = stopped ? "stopped" : `the answer ends here: ${failure.message}`;
    shown.note.className = stopped ? "" : "bad";
    return;
  }
  shown.line.remove();
  if (!stopped) say("error", failure.message);
  if (!at("chat-input").value) at("chat-input").value = text;
}

function stop() {
  if (chat.running) chat.running.abort();
}

at("chat-form").addEventListener("submit", (event) => { event.preventDefault(); if (chat.running) stop(); else send(); });
at("chat-input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
at("chat").addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
at("chat-clear").addEventListener("click", () => {
  stop();
  chat.messages = [];
  at("chat-log").replaceChildren();
});
at("chat-open").addEventListener("click", () => openChat(at("chat").hidden));
at("chat-close").addEventListener("click", () => { openChat(false); at("chat-open").focus(); });
at("ask").addEventListener("click", () => openChat(true));
if (location.hash === "#chat") openChat(true);
