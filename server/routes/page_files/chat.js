// The chat: one conversation, streamed, with what each answer cost and what its slot lost.

import { render } from "./markdown.js";
import { call, element, events } from "./server.js";

const MAX_FILE_BYTES = 2_000_000;
const $ = (id) => document.getElementById(id);
let conversation = []; // the messages so far, as the API takes them
let attached = []; // {name, text}
let running = null; // the AbortController of the answer under way

export async function startChat() {
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("new").addEventListener("click", clear);
  $("attach").addEventListener("change", attach);
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", () => copy(button));
  }
  await Promise.allSettled([listModels(), listPools()]);
}

async function listModels() {
  const { data } = await (await call("/v1/models")).json();
  $("model").replaceChildren(...data.map((model) => new Option(model.id)));
}

async function listPools() {
  const { pools } = await (await call("/server_info")).json();
  $("pool").append(...pools.map((pool) => new Option(
    `${pool.name}: ${pool.num_slots} slots of ${pool.capacity}, ${pool.policy}`, pool.name)));
}

function clear() {
  running?.abort();
  conversation = [];
  attached = [];
  showFiles();
  $("messages").replaceChildren(element("p", "empty", "Ask the model something. Long texts can be attached as files."));
  $("question").focus();
}

async function attach() {
  for (const file of $("attach").files) {
    if (file.size > MAX_FILE_BYTES) {
      show("error", `${file.name} has ${file.size} bytes. At most ${MAX_FILE_BYTES} can be attached.`);
      continue;
    }
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      attached.push({ name: file.name, text });
    } catch {
      show("error", `${file.name} is not text in UTF-8.`);
    }
  }
  $("attach").value = "";
  showFiles();
}

function showFiles() {
  $("files").replaceChildren(...attached.map((file, index) => {
    const item = element("li");
    const button = element("button", "", `${file.name} ×`);
    button.type = "button";
    button.setAttribute("aria-label", `Remove ${file.name}`);
    button.addEventListener("click", () => {
      attached.splice(index, 1);
      showFiles();
    });
    item.append(button);
    return item;
  }));
}

/** Append a message to the conversation on the page. */
function show(role, text) {
  $("messages").querySelector(".empty")?.remove();
  const message = element("article", `message ${role}`, text);
  message.setAttribute("aria-label", { user: "You", assistant: "Model", error: "Error" }[role]);
  $("messages").append(message);
  message.scrollIntoView({ block: "end" });
  return message;
}

function requestBody() {
  const system = $("system").value.trim();
  return {
    model: $("model").value || undefined,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation],
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    pool: $("pool").value || undefined,
    return_kept_tokens: $("show-kept").checked || undefined,
    stream: true,
    stream_options: { include_usage: true },
  };
}

function number(id) {
  const value = $(id).valueAsNumber;
  return Number.isFinite(value) ? value : undefined;
}

async function send() {
  const question = $("question").value.trim();
  if (running || !(question || attached.length)) return;
  // The question goes last: the prompt's end decides what a compressed slot keeps.
  const texts = attached.map((file) => `${file.name}:\n${file.text}\n`);
  conversation.push({ role: "user", content: [...texts, question].join("\n") });
  show("user", [...attached.map((file) => `[${file.name}, ${file.text.length} characters]`), question].join("\n"));
  $("question").value = "";
  attached = [];
  showFiles();
  const body = requestBody();
  showCode(body);
  running = new AbortController();
  $("stop").hidden = false;
  $("send").hidden = true;
  try {
    await answer(body, running);
  } finally {
    running = null;
    $("stop").hidden = true;
    $("send").hidden = false;
  }
}

/** Stream one answer onto the page and into the conversation. */
async function answer(body, { signal }) {
  const own = conversation; // "New chat" begins another one
  const message = show("assistant", "");
  const [thoughts, text, stats] = [element("details"), element("div"), element("p", "stats", "waiting for the first token")];
  const reasoning = element("div", "reasoning");
  thoughts.append(element("summary", "", "Reasoning"), reasoning);
  thoughts.hidden = true;
  message.append(thoughts, text, stats);
  const seen = { content: "", reasoning: "", usage: null, kept: null, sent: performance.now(), first: 0, last: 0 };
  let frame = 0; // in which it will be drawn
  const draw = () => {
    frame = 0;
    const pane = $("messages");
    const isAtEnd = pane.scrollHeight - pane.scrollTop - pane.clientHeight < 80;
    text.replaceChildren(render(seen.content));
    reasoning.textContent = seen.reasoning;
    thoughts.hidden = !seen.reasoning;
    stats.textContent = described(seen);
    if (isAtEnd) pane.scrollTop = pane.scrollHeight;
  };
  let failure = null;
  try {
    const response = await call("/v1/chat/completions", {
      method: "POST", signal, body: JSON.stringify(body), headers: { "Content-Type": "application/json" },
    });
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      take(chunk, seen);
      frame ||= requestAnimationFrame(draw);
    }
  } catch (error) {
    failure = error;
  }
  cancelAnimationFrame(frame); // it would draw over what follows
  draw();
  if (seen.kept) message.append(keptTokens(seen.kept));
  if (signal.aborted) stats.textContent += " · stopped";
  else if (failure) show("error", failure.message);
  if (seen.content) own.push({ role: "assistant", content: seen.content });
  // A question without an answer must not stay before the next one.
  else own.pop();
}

function take(chunk, seen) {
  seen.kept = chunk.kept_tokens ?? seen.kept;
  const delta = chunk.choices[0]?.delta ?? {};
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  if (delta.content || reasoning) {
    seen.last = performance.now();
    seen.first ||= seen.last;
  }
  seen.content += delta.content ?? "";
  seen.reasoning += reasoning;
  seen.usage = chunk.usage ?? seen.usage;
}

function described({ usage, sent, first, last }) {
  const parts = [];
  if (first) parts.push(`first token after ${((first - sent) / 1000).toFixed(2)} s`);
  if (usage) {
    const speed = (usage.completion_tokens - 1) / ((last - first) / 1000);
    parts.push(`${usage.prompt_tokens} tokens in, ${usage.completion_tokens} out`);
    if (Number.isFinite(speed) && speed > 0) parts.push(`${speed.toFixed(1)} tokens/s`);
    const { pool, kept_tokens: kept, evicted_tokens: evicted, compression } = usage.cache;
    parts.push(`slot of ${pool}: ${kept} kept, ${evicted} evicted (${compression.toFixed(2)}×)`);
    const cached = usage.prompt_tokens_details.cached_tokens;
    if (cached) parts.push(`${cached} restored`);
  }
  return parts.join(" · ");
}

/** Return the prompt's text, shaded by the share of layers and heads whose slot held each token. */
function keptTokens({ tokens, mean }) {
  const details = element("details", "kept-tokens");
  const num = (isSo) => mean.filter(isSo).length;
  details.append(element("summary", "", "What the slot kept of the prompt"), element("p", "stats",
    `Of ${mean.length} tokens, ${num((share) => share === 1)} are held by all layers and heads, ${num((share) => share === 0)} by none. The darker a text, the more hold it.`));
  const text = element("div", "prompt");
  // Runs of equal shares become one element: a long prompt would have thousands.
  for (let start = 0, end; start < tokens.length; start = end) {
    end = start;
    while (end < tokens.length && mean[end] === mean[start]) end += 1;
    const run = element("span", mean[start] ? "" : "evicted", tokens.slice(start, end).join(""));
    run.style.setProperty("--share", mean[start]);
    run.title = `held by ${Math.round(100 * mean[start])} % of layers and heads`;
    text.append(run);
  }
  details.append(text);
  return details;
}

// The last request as code

function showCode(body) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  $("curl").textContent = `curl -N ${location.origin}/v1/chat/completions \\
  -H "Authorization: Bearer $SNAPSERVE_API_KEY" -H 'Content-Type: application/json' -d '${json}'`;
  // The library has no names for these.
  const { pool, return_kept_tokens, ...named } = body;
  const extra = given({ pool, return_kept_tokens });
  const fields = Object.entries(given({ ...named, extra_body: Object.keys(extra).length ? extra : undefined }));
  $("python").textContent = `import os

from openai import OpenAI  # pip install openai

client = OpenAI(base_url="${location.origin}/v1", api_key=os.environ.get("SNAPSERVE_API_KEY", "none"))
stream = client.chat.completions.create(
${fields.map(([name, value]) => `    ${name}=${python(value)},`).join("\n")}
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    else:
        print()
        print(chunk.usage)`;
  $("no-code").hidden = true;
  $("code-blocks").hidden = false;
}

const given = (members) => Object.fromEntries(Object.entries(members).filter(([, value]) => value !== undefined));

/** Return a value of JSON as a literal of Python. */
function python(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${python(each)}`).join(", ")}}`;
}

async function copy(button) {
  const block = $(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(block.textContent);
    button.textContent = "Copied";
  } catch {
    // Browsers refuse it to pages without TLS, except on this machine. A selection can be copied by hand.
    getSelection().selectAllChildren(block);
    button.textContent = "Selected";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 2_000);
}
