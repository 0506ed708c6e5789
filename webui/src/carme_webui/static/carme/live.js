// Reloads the live part of a page as soon as something has changed: server-sent events say when.
// A page that nobody looks at holds no connection (a browser has few); it still reloads now and then by itself.
"use strict";

const page = document.getElementById("live-updates");
let stream = null;

function listen() {
  if (stream || document.hidden) return;
  const seen = document.getElementById("live")?.dataset.version ?? "";
  stream = new EventSource(`${page.dataset.url}?seen=${encodeURIComponent(seen)}`);
  stream.addEventListener("update", () => document.body.dispatchEvent(new Event("update")));
  stream.addEventListener("error", () => {
    // The browser tries again by itself, unless the portal refused: then the reload leads to the sign-in.
    if (stream?.readyState === EventSource.CLOSED) {
      rest();
      setTimeout(listen, 5000);
    }
  });
}

function rest() {
  stream?.close();
  stream = null;
}

// The page's message about an action ("is in the queue", "is being ended") is past when the state changes.
const state = () => document.getElementById("live")?.dataset.state;
const stateAtFirst = state();

// "Start and open": the page gives way to the session as soon as that is ready, once. Who comes back stays.
let opens = new URLSearchParams(location.search).has("open");

function openWhenReady() {
  const link = document.getElementById("open");
  if (opens && link) {
    opens = false;
    history.replaceState(null, "", location.pathname);
    location.assign(link.href);
  }
}

if (page) {
  let known = stateAtFirst;
  openWhenReady();
  document.body.addEventListener("htmx:after:swap", () => {
    // Other parts of the page are of the state that is shown, too.
    if (state() !== known) document.body.dispatchEvent(new Event("state"));
    known = state();
    openWhenReady();
    if (state() !== stateAtFirst) for (const message of document.querySelectorAll(".notice.passing:not(.bad)")) message.remove();
  });
  document.addEventListener("visibilitychange", () => (document.hidden ? rest() : listen()));
  addEventListener("pagehide", rest);
  addEventListener("pageshow", listen);
  listen();
}
