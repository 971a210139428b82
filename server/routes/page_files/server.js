// Requests to this server: the key, errors and streams. The key is held in this module's memory only.

let key = "";
let asking = null; // the answer to the open dialog

export const setKey = (value) => { key = value; };
/** Return the header of the key, if there is one. */
export const authorization = () => (key ? { Authorization: `Bearer ${key}` } : {});

/** Ask the user for a key, once for all callers that wait. Resolves to whether one was given. */
export function askForKey(reason) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const input = document.getElementById("key");
    if (reason) document.getElementById("key-reason").textContent = reason;
    dialog.returnValue = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      const isGiven = dialog.returnValue === "ok" && input.value.trim() !== "";
      if (isGiven) setKey(input.value.trim());
      input.value = "";
      asking = null;
      resolve(isGiven);
    }, { once: true });
  });
  return asking;
}

/** As `fetch`, with the key. Asks for a key after a 401, and throws an Error with the server's message. */
export async function call(path, options = {}) {
  for (;;) {
    const used = key;
    const headers = { ...options.headers, ...authorization() };
    const response = await fetch(path, { ...options, headers });
    if (response.ok) return response;
    // Another call may have got the key meanwhile.
    if (response.status === 401 && (key !== used || await askForKey(
      used ? "The server does not know this key." : "This server needs a key. It stays in this page's memory."))) continue;
    throw new Error(await messageOf(response));
  }
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

/** Yield the objects of a stream of server-sent events. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Return a new element with a class and a text. */
export function element(tag, name = "", text = "") {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text) made.textContent = text;
  return made;
}
