// Markdown of a model's answer: `parse` makes plain objects of it, `rendered` makes elements of those. Text only ever becomes text
// nodes, links stay text with their address, and nothing is loaded. An answer may end anywhere: it is read while it is written.
"use strict";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const ITEM = /^(\s*)(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MOST_DEPTH = 8;                // quotes and lists inside each other

// [{ kind: "code", language, text, open } | { kind: "heading", level, spans } | { kind: "list", ordered, start, items: [blocks] } |
//  { kind: "quote", blocks } | { kind: "table", head, rows } | { kind: "rule" } | { kind: "text", spans }]
function parse(text, depth = 0) {
  const lines = text.split("\n"), blocks = [];
  let place = 0, words = [];
  const flush = () => { if (words.length) blocks.push({ kind: "text", spans: inline(words.join("\n")) }); words = []; };
  const add = (block, next) => { flush(); blocks.push(block); place = next; };
  while (place < lines.length) {
    const line = lines[place], fence = line.match(FENCE), heading = line.match(HEADING);
    if (fence) add(...codeBlock(lines, place, fence));
    else if (heading) add({ kind: "heading", level: heading[1].length, spans: inline(heading[2]) }, place + 1);
    else if (RULE.test(line)) add({ kind: "rule" }, place + 1);
    else if (QUOTE.test(line) && depth < MOST_DEPTH) add(...quote(lines, place, depth));
    else if (ITEM.test(line) && depth < MOST_DEPTH) add(...list(lines, place, depth));
    else if (line.includes("|") && DIVIDER.test(lines[place + 1] || "") && (lines[place + 1] || "").includes("|")) add(...grid(lines, place));
    else if (line.trim()) { words.push(line); place += 1; } else { flush(); place += 1; }
  }
  flush();
  return blocks;
}

function codeBlock(lines, place, fence) {
  const end = lines.findIndex((line, index) => index > place && line.trim().startsWith(fence[1]) && !line.trim().slice(fence[1].length).trim());
  const body = lines.slice(place + 1, end < 0 ? lines.length : end);
  return [{ kind: "code", language: fence[2], text: body.join("\n"), open: end < 0 }, end < 0 ? lines.length : end + 1];
}

function quote(lines, place, depth) {
  let end = place;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  return [{ kind: "quote", blocks: parse(lines.slice(place, end).map((line) => line.match(QUOTE)[1]).join("\n"), depth + 1) }, end];
}

// Items of the same kind and indentation; lines that are indented further belong to the item before them.
function list(lines, place, depth) {
  const [, indent, , number] = lines[place].match(ITEM), items = [];
  let end = place;
  for (; end < lines.length; end++) {
    const found = lines[end].match(ITEM), own = found && found[1].length <= indent.length;
    if (own && (found[1].length < indent.length || (found[3] === undefined) !== (number === undefined))) break;
    const further = lines[end].length - lines[end].trimStart().length > indent.length;
    if (own) items.push([found[4]]);
    else if (lines[end].trim() === "") {
      const next = lines.slice(end + 1).find((line) => line.trim());
      if (!next || !(next.match(ITEM) || next.length - next.trimStart().length > indent.length)) break;
      items[items.length - 1].push("");
    } else if (further) items[items.length - 1].push(lines[end].slice(Math.min(indent.length + 2, lines[end].length - lines[end].trimStart().length)));
    else break;
  }
  return [{ kind: "list", ordered: number !== undefined, start: Number(number || 1), items: items.map((each) => parse(each.join("\n"), depth + 1)) }, end];
}

function grid(lines, place) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((each) => inline(each.trim()));
  let end = place + 2;
  while (end < lines.length && lines[end].includes("|") && lines[end].trim()) end += 1;
  return [{ kind: "table", head: cells(lines[place]), rows: lines.slice(place + 2, end).map(cells) }, end];
}

// Spans: { kind: "text" | "code" | "strong" | "em" | "del", text } or { …, spans }. Each rule takes what stands between its marks, which
// are never far apart: so a long answer full of single marks is still read in linear time.
const SPANS_OF = [
  ["code", /^(`+)([^`]|[^`][\s\S]{0,2000}?[^`])\1(?!`)/, 2], ["strong", /^\*\*(?=\S)([\s\S]{0,2000}?\S)\*\*/, 1],
  ["strong", /^__(?=\S)([\s\S]{0,2000}?\S)__(?!\w)/, 1], ["del", /^~~(?=\S)([\s\S]{0,2000}?\S)~~/, 1],
  ["em", /^\*(?![\s*])([^*]{0,2000}[^\s*])\*(?!\*)/, 1], ["em", /^_(?![\s_])([^_]{0,2000}[^\s_])_(?!\w)/, 1],
];

function inline(text, depth = 0) {
  const found = [];
  let plain = "", rest = text, before = "";
  const flush = () => { if (plain) found.push({ kind: "text", text: plain }); plain = ""; };
  while (rest) {
    const mark = "`*_~\\![".includes(rest[0]) ? match(rest, before, depth) : null;
    if (mark) {
      if (mark.span) { flush(); found.push(mark.span); } else plain += mark.text;
      before = rest[mark.length - 1];
      rest = rest.slice(mark.length);
    } else {
      const next = rest.slice(1).search(/[`*_~\\![]/), length = next < 0 ? rest.length : next + 1;
      plain += rest.slice(0, length);
      before = rest[length - 1];
      rest = rest.slice(length);
    }
  }
  flush();
  return found;
}

function match(rest, before, depth) {
  const escaped = rest.match(/^\\([!-/:-@[-`{-~])/), link = rest.match(/^!?\[([^\][]{0,300})\]\(([^()\s]{1,2000})[^()]{0,300}\)/);
  if (escaped) return { text: escaped[1], length: 2 };
  if (link) return { text: link[1] && link[1] !== link[2] ? `${link[1]} (${link[2]})` : link[2], length: link[0].length };
  if (rest[0] === "_" && /\w/.test(before)) return null;               // snake_case
  for (const [kind, rule, group] of SPANS_OF) {
    const hit = rest.match(rule);
    if (!hit) continue;
    const inner = kind === "code" || depth > 3 ? { text: hit[group].replace(/\n/g, " ") } : { spans: inline(hit[group], depth + 1) };
    return { span: { kind, ...inner }, length: hit[0].length };
  }
  return null;
}

// -- elements ---------------------------------------------------------------------------------------------------------

function spansInto(holder, spans) {
  for (const span of spans) {
    if (span.kind === "text") { holder.append(span.text); continue; }
    const made = document.createElement(span.kind);
    if (span.spans) spansInto(made, span.spans); else made.textContent = span.text;
    holder.append(made);
  }
  return holder;
}

function rendered(blocks) {
  return blocks.map((block) => {
    const make = (name) => document.createElement(name);
    if (block.kind === "code") return codeElement(block);
    if (block.kind === "rule") return make("hr");
    if (block.kind === "heading") return spansInto(make(`h${Math.min(6, block.level + 2)}`), block.spans);
    if (block.kind === "text") return spansInto(make("p"), block.spans);
    const made = make(block.kind === "quote" ? "blockquote" : block.kind === "table" ? "table" : block.ordered ? "ol" : "ul");
    if (block.kind === "quote") made.append(...rendered(block.blocks));
    else if (block.kind === "list") {
      if (block.ordered && block.start !== 1) made.start = block.start;
      made.append(...block.items.map((item) => { const entry = make("li"); entry.append(...rendered(item)); return entry; }));
    } else {
      for (const [row, kind] of [[block.head, "th"], ...block.rows.map((each) => [each, "td"])]) {
        const line = make("tr");
        line.append(...row.map((cell) => spansInto(make(kind), cell)));
        made.append(line);
      }
    }
    return made;
  });
}

function codeElement(block) {
  const holder = document.createElement("div"), bar = document.createElement("div"), body = document.createElement("pre");
  holder.className = "code";
  bar.className = "code-bar";
  bar.append(block.language || "code", copyButton(() => block.text));
  body.textContent = block.text;
  body.tabIndex = 0;                                                   // scrolls with the keyboard
  holder.append(bar, body);
  return holder;
}

// Browsers have a clipboard only on https and localhost; elsewhere the old way still works.
async function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "off-screen";
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("the browser does not allow it");
  return undefined;
}

function copyButton(text, label = "Copy") {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet copy";
  button.textContent = label;
  button.addEventListener("click", () => copyText(text()).then(() => "Copied", () => "Not allowed").then((said) => {
    button.textContent = said;
    setTimeout(() => { button.textContent = label; }, 1500);
  }));
  return button;
}
