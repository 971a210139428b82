// The live view: every slot as its sections, and the rates of the last minutes, from `GET /slots/events`.

import { call, element, events } from "./server.js";

const MAX_POINTS = 300;
const RETRY_MS = 2_000;
const CURVES = [
  { member: "tokens_per_second", title: "Tokens per second", format: (value) => value.toFixed(1), shade: "--ring" },
  { member: "ttft", title: "Time to first token", format: duration, shade: "--kept" },
  { member: "time_per_token", title: "Time per later token", format: duration, shade: "--lent" },
  { member: "waiting", title: "Sequences that wait", format: String, shade: "--head" },
];
const FIGURES = ["Running", "Waiting", "Tokens/s", "First token", "Later tokens", "Prompt tokens to read", "Stored prompts", "Restored of prompts"];
const $ = (id) => document.getElementById(id);

let connection = null; // the AbortController of the stream
let setup = null; // the pools, as the server described them
let points = [];
let rows = []; // per pool and slot {canvas, note}

function duration(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(1)} s`;
  return `${(seconds * 1000).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
}

export async function startLive() {
  if (connection) return;
  const own = connection = new AbortController();
  while (connection === own) {
    try {
      const response = await call("/slots/events", { signal: own.signal });
      $("live-state").textContent = "Connected.";
      points = [];
      for await (const event of events(response)) take(event);
      $("live-state").textContent = "The server has closed the stream.";
    } catch (error) {
      if (own.signal.aborted) return;
      $("live-state").textContent = error.message;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

export function stopLive() {
  connection?.abort();
  connection = null;
}

function take(event) {
  if (event.type === "pools") {
    setup = event;
    build();
  } else if (event.type === "points") {
    points = [...points, ...event.points].slice(-MAX_POINTS);
    drawCurves();
  } else {
    drawSlots(event);
    showFigures(event);
  }
}

function build() {
  rows = [];
  $("slots").replaceChildren(...setup.pools.flatMap((pool) => {
    const title = element("h2", "", `${pool.name}: ${pool.policy}, ${pool.num_slots} slots of ${pool.capacity} entries (${pool.num_sink} sinks, ring ${pool.num_recent}, kept ${pool.num_kept})`);
    const slots = Array.from({ length: pool.num_slots }, (_, index) => {
      const row = element("div", "slot");
      const canvas = element("canvas");
      canvas.setAttribute("role", "img");
      const note = element("span", "note", "free");
      row.append(element("span", "", `#${index}`), canvas, note);
      return { row, canvas, note };
    });
    rows.push(slots);
    return [title, ...slots.map((slot) => slot.row)];
  }));
  $("figures").replaceChildren(...FIGURES.map((name) => {
    const box = element("div");
    box.append(element("dt", "", name), element("dd", "", "–"));
    return box;
  }));
  $("curves").replaceChildren(...CURVES.map((curve) => {
    const box = element("div");
    const canvas = element("canvas");
    canvas.id = `curve-${curve.member}`;
    canvas.setAttribute("role", "img");
    box.append(element("h2", "", curve.title), canvas);
    return box;
  }));
}

/** Return a canvas's context and size in CSS pixels, with as many pixels as the screen has. */
function prepared(canvas) {
  const [width, height, ratio] = [canvas.clientWidth, canvas.clientHeight, devicePixelRatio];
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

const shade = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function drawSlots(sample) {
  const shades = Object.fromEntries(["sink", "ring", "head", "kept", "lent", "borrowed", "free"].map((name) => [name, shade(`--${name}`)]));
  const held = new Map(sample.slots.map((slot) => [`${slot.pool}/${slot.slot}`, slot]));
  rows.forEach((slots, pool) => slots.forEach(({ canvas, note }, index) => {
    const slot = held.get(`${pool}/${index}`);
    note.textContent = slot ? noteOf(slot) : "free";
    canvas.setAttribute("aria-label", `Slot ${index}: ${note.textContent}`);
    drawSlot(canvas, setup.pools[pool], slot, shades);
  }));
}

function noteOf(slot) {
  if (slot.state === "prefill") return `reads ${slot.computed} of ${slot.prompt} tokens`;
  const evicted = slot.computed - slot.live;
  return `${slot.prompt} in, ${slot.output} out, ${slot.live} held, ${evicted} evicted${slot.wraps ? `, wrapped ${slot.wraps}×` : ""}`;
}

/** Draw a slot column by column: a column has the shade of the entry at its place. */
function drawSlot(canvas, pool, slot, shades) {
  const { context, width, height } = prepared(canvas);
  // Four sinks of thousands of entries would not be seen.
  const sinkWidth = pool.num_sink ? Math.max(8, width * pool.num_sink / pool.capacity) : 0;
  const rest = pool.capacity - pool.num_sink;
  const entryAt = (x) => x < sinkWidth
    ? Math.floor(x / sinkWidth * pool.num_sink)
    : pool.num_sink + Math.floor((x - sinkWidth) / (width - sinkWidth) * rest);
  const placeOf = (entry) => entry < pool.num_sink ? entry / pool.num_sink * sinkWidth
    : sinkWidth + (entry - pool.num_sink) / rest * (width - sinkWidth);
  if (slot) {
    for (let x = 0; x < width; x += 1) {
      const [name, strength] = lookOf(entryAt(x + 0.5), pool, slot);
      context.globalAlpha = strength;
      context.fillStyle = shades[name];
      if (name !== "free") context.fillRect(x, 0, 1.02, height);
    }
    context.globalAlpha = 1;
    const [start, , live, head] = slot.ring;
    if (live && head >= start) {
      context.fillStyle = shades.head;
      context.fillRect(Math.min(placeOf(head + 0.5) - 1.5, width - 3), 0, 3, height);
    }
    if (slot.state === "prefill" && slot.prompt) {
      context.fillStyle = shades.head;
      context.fillRect(0, height - 4, width * slot.computed / slot.prompt, 4);
    }
  }
  // Where the ring's own entries begin and end.
  context.fillStyle = shade("--back");
  for (const border of [pool.num_sink, pool.num_sink + pool.num_recent]) {
    if (border > 0 && border < pool.capacity) context.fillRect(placeOf(border) - 0.5, 0, 1, height);
  }
}

/** Return the name of an entry's shade and its strength. */
function lookOf(entry, pool, slot) {
  const [start, size, live, head] = slot.ring;
  if (entry < pool.num_sink) return entry < slot.sinks ? ["sink", 1] : ["free", 1];
  const [keptStart, numKept] = slot.kept;
  if (entry >= keptStart && entry < keptStart + numKept) return ["kept", 1];
  if (entry >= start + size) return ["free", 1];
  const [lentStart, numLent] = slot.lent_to_kept;
  if ((entry - lentStart + size) % size < numLent) return ["lent", 1];
  const age = (head - entry + size) % size;
  if (age >= live) return ["free", 1];
  return [entry >= start + pool.num_recent ? "borrowed" : "ring", 1 - 0.65 * age / size];
}

function showFigures(sample) {
  const last = points.at(-1) ?? {};
  const store = sample.store ?? {};
  const time = (seconds) => seconds == null ? "–" : duration(seconds);
  const values = [
    sample.running ?? 0,
    sample.waiting ?? 0,
    last.tokens_per_second?.toFixed(1) ?? "–",
    time(points.findLast((point) => point.ttft != null)?.ttft),
    time(points.findLast((point) => point.time_per_token != null)?.time_per_token),
    sample.unread_prompt_tokens ?? 0,
    setup.store_bytes ? `${Math.round(store.bytes / 2 ** 20)} of ${Math.round(setup.store_bytes / 2 ** 20)} MiB` : "off",
    store.queried_tokens ? `${Math.round(100 * store.hit_tokens / store.queried_tokens)} %` : "–",
  ];
  [...$("figures").querySelectorAll("dd")].forEach((box, index) => { box.textContent = values[index]; });
  const waiting = (sample.pools ?? []).map((pool, index) => `${setup.pools[index].name}: ${pool.in_use} of ${setup.pools[index].num_slots} slots, ${pool.waiting} waiting`);
  $("live-state").textContent = [`Engine: ${sample.state}`, ...waiting].join(" · ");
}

function drawCurves() {
  for (const curve of CURVES) {
    const canvas = $(`curve-${curve.member}`);
    if (!canvas) continue;
    const { context, width, height } = prepared(canvas);
    const values = points.map((point) => point[curve.member] ?? null);
    const most = Math.max(1e-9, ...values.filter((value) => value !== null));
    context.fillStyle = context.strokeStyle = shade(curve.shade);
    context.lineWidth = 2;
    context.beginPath();
    let isDown = false;
    values.forEach((value, index) => {
      if (value === null) return;
      const x = width - (points.length - index) * width / MAX_POINTS;
      const y = height - 4 - value / most * (height - 24);
      if (isDown) context.lineTo(x, y);
      else context.moveTo(x, y);
      context.fillRect(x - 1, y - 1, 2, 2);
      isDown = true;
    });
    context.stroke();
    context.fillStyle = shade("--soft");
    context.font = "12px system-ui, sans-serif";
    const text = most > 1e-9 ? `most ${curve.format(most)}` : "nothing yet";
    context.fillText(text, 6, 14);
    canvas.setAttribute("aria-label", `${curve.title}, last five minutes: ${text}`);
  }
}
