// Markdown as DOM nodes. A model's text becomes text nodes only: no string is ever read as HTML. Links lead to
// http, https and mail only, and images become links, so that showing an answer requests nothing.

const MAX_DEPTH = 8;
const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*|!?\[([^[\]\n]*)\]\(([^()\s]*)\)|(https?:\/\/[^\s<>()]+)/g;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const DELIMITER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** Return the text as a fragment of nodes. */
export function render(text) {
  const fragment = document.createDocumentFragment();
  blocks(fragment, text.split("\n"), 0);
  return fragment;
}

function add(parent, tag) {
  return parent.appendChild(document.createElement(tag));
}

function blocks(parent, lines, depth) {
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    const fence = /^\s{0,3}(```+|~~~+)\s*([\w+#.-]*)/.exec(line);
    const heading = /^(#{1,6})\s+(.*)$/.exec(line);
    if (!line.trim()) {
      i += 1;
    } else if (fence) {
      const start = ++i;
      while (i < lines.length && !lines[i].trimStart().startsWith(fence[1])) i += 1;
      const code = add(add(parent, "pre"), "code");
      code.textContent = lines.slice(start, i).join("\n");
      if (fence[2]) code.dataset.language = fence[2];
      i += 1;
    } else if (heading) {
      inline(add(parent, `h${Math.min(heading[1].length + 2, 6)}`), heading[2]);
      i += 1;
    } else if (RULE.test(line)) {
      add(parent, "hr");
      i += 1;
    } else if (line.startsWith(">") && depth < MAX_DEPTH) {
      const start = i;
      while (i < lines.length && lines[i].startsWith(">")) i += 1;
      blocks(add(parent, "blockquote"), lines.slice(start, i).map((each) => each.replace(/^> ?/, "")), depth + 1);
    } else if (ITEM.test(line) && depth < MAX_DEPTH) {
      i = list(parent, lines, i, depth);
    } else if (line.includes("|") && i + 1 < lines.length && lines[i + 1].includes("-") && DELIMITER.test(lines[i + 1])) {
      i = table(parent, lines, i);
    } else {
      const start = i++;
      while (i < lines.length && lines[i].trim() && !/^\s{0,3}(```|~~~|#{1,6}\s|>)/.test(lines[i]) && !ITEM.test(lines[i])) i += 1;
      inline(add(parent, "p"), lines.slice(start, i).join("\n"));
    }
  }
}

function list(parent, lines, first, depth) {
  const [, indent, marker] = ITEM.exec(lines[first]);
  const isOrdered = /\d/.test(marker);
  const made = add(parent, isOrdered ? "ol" : "ul");
  if (isOrdered) made.start = Number.parseInt(marker, 10);
  let i = first;
  while (i < lines.length) {
    const item = ITEM.exec(lines[i]);
    if (!item || item[1].length !== indent.length || /\d/.test(item[2]) !== isOrdered) break;
    const body = [item[3]];
    i += 1;
    while (i < lines.length && lines[i].trim() && lines[i].search(/\S/) > indent.length) body.push(lines[i++]);
    const entry = add(made, "li");
    inline(entry, body[0]);
    const rest = body.slice(1);
    const margin = Math.min(...rest.map((each) => each.search(/\S/)));
    if (rest.length) blocks(entry, rest.map((each) => each.slice(margin)), depth + 1);
    // One empty line between items does not end the list.
    if (i + 1 < lines.length && !lines[i].trim() && ITEM.test(lines[i + 1])) i += 1;
  }
  return i;
}

function table(parent, lines, first) {
  const made = add(parent, "table");
  let i = first;
  for (; i < lines.length && lines[i].includes("|"); i += 1) {
    if (i === first + 1) continue;
    const row = add(made, "tr");
    for (const cell of lines[i].trim().replace(/^\||\|$/g, "").split("|")) {
      inline(add(row, i === first ? "th" : "td"), cell.trim());
    }
  }
  return i;
}

function inline(parent, text, depth = 0) {
  let end = 0;
  for (const match of depth < MAX_DEPTH ? text.matchAll(INLINE) : []) {
    parent.append(text.slice(end, match.index));
    end = match.index + match[0].length;
    const [whole, code, strong, emphasis, label, target, address] = match;
    if (code !== undefined) add(parent, "code").textContent = code;
    else if (strong !== undefined) inline(add(parent, "strong"), strong, depth + 1);
    else if (emphasis !== undefined) inline(add(parent, "em"), emphasis, depth + 1);
    else link(parent, whole, label ?? address, target ?? address);
  }
  parent.append(text.slice(end));
}

function link(parent, whole, label, target) {
  if (!/^(https?:\/\/|mailto:)/i.test(target) || !URL.canParse(target)) {
    parent.append(whole);
    return;
  }
  const made = add(parent, "a");
  made.href = target;
  made.rel = "noopener noreferrer";
  made.target = "_blank";
  made.textContent = label || target;
}
