// The page's two views, the key and the server's state.

import { startChat } from "./chat.js";
import { startLive, stopLive } from "./live.js";
import { askForKey } from "./server.js";

const tabs = [...document.querySelectorAll("[role=tab]")];

function select(tab) {
  for (const each of tabs) {
    const isSelected = each === tab;
    each.setAttribute("aria-selected", isSelected);
    each.tabIndex = isSelected ? 0 : -1;
    document.getElementById(each.getAttribute("aria-controls")).hidden = !isSelected;
  }
  history.replaceState(null, "", tab.id === "tab-live" ? "#live" : "#");
  if (tab.id === "tab-live") startLive();
  else stopLive();
}

for (const tab of tabs) {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = tabs[(tabs.indexOf(tab) + 1) % tabs.length];
    other.focus();
    select(other);
  });
}

document.getElementById("set-key").addEventListener("click", () => askForKey());
document.getElementById("key-cancel").addEventListener("click", () => document.getElementById("key-dialog").close("cancel"));
// On a narrow screen the settings would take the room of the conversation.
if (matchMedia("(max-width: 48rem)").matches) document.getElementById("settings").open = false;

async function showHealth() {
  let text = "not reached";
  try {
    text = (await (await fetch("/ready")).json()).status;
  } catch { /* the server is gone */ }
  document.getElementById("health").textContent = `server: ${text}`;
  setTimeout(showHealth, text === "ready" ? 10_000 : 2_000);
}

showHealth();
startChat();
select(location.hash === "#live" ? tabs[1] : tabs[0]);
