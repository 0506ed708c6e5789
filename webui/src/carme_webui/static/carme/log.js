// Follows what a job writes: server-sent events bring the text, and the page stays at the end if it was there.
"use strict";

const log = document.getElementById("log");
const trouble = document.getElementById("log-trouble");
const MOST = 1_000_000; // letters that a page keeps
let following = null;

function showEmpty() {
  log.classList.toggle("nothing", !log.textContent);
}

function append(text) {
  const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
  log.append(text);
  if (log.textContent.length > MOST) log.textContent = log.textContent.slice(-MOST / 2);
  if (atEnd) log.scrollTop = log.scrollHeight;
  showEmpty();
}

function follow() {
  if (following || document.hidden || !log.dataset.url) return;
  following = new EventSource(`${log.dataset.url}?offset=${log.dataset.offset}`);
  following.addEventListener("text", (event) => {
    log.dataset.offset = event.lastEventId;
    trouble.hidden = true;
    append(JSON.parse(event.data));
  });
  following.addEventListener("trouble", (event) => {
    const { text, help, more } = JSON.parse(event.data);
    trouble.textContent = text;
    if (help) trouble.append(" ", Object.assign(document.createElement("a"), { href: help, textContent: more }));
    trouble.hidden = false;
  });
  following.addEventListener("over", () => {
    rest();
    delete log.dataset.url;
  });
}

function rest() {
  following?.close();
  following = null;
}

if (log) {
  showEmpty();
  log.scrollTop = log.scrollHeight;
  document.addEventListener("visibilitychange", () => (document.hidden ? rest() : follow()));
  addEventListener("pagehide", rest);
  addEventListener("pageshow", follow);
  follow();
}
