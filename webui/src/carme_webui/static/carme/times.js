// Shows each moment (<time data-style>) by the browser's clock, or by that of the zone that the user has chosen. On
// hover it is as the server wrote it, with the zone.
"use strict";

(() => {
  // English as the portal writes it: the day before the month, the hours from 0 to 23.
  const language = document.documentElement.lang.replace(/^en$/, "en-GB") || undefined;
  // English months have three letters, as on the server, where British English has "Sept".
  const written = (parts) =>
    parts.map(({ type, value }) => (type === "month" && language === "en-GB" ? value.slice(0, 3) : value)).join("");
  const date = { day: "numeric", month: "short" };
  const clock = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  const STYLES = {
    clock,
    seconds: { ...clock, second: "2-digit" },
    short: { ...date, ...clock },
    minutes: { ...date, year: "numeric", ...clock },
    long: { ...date, year: "numeric", ...clock, second: "2-digit" },
    day: { ...date, year: "numeric" },
    span: { weekday: "short", ...date, ...clock },
  };
  const UNITS = [["year", 31536000], ["month", 2592000], ["week", 604800], ["day", 86400], ["hour", 3600], ["minute", 60]];
  const RENEW_MS = 30000;
  const formats = new Map();

  function make(style) {
    try {
      return new Intl.DateTimeFormat(language, { ...style, timeZone: document.documentElement.dataset.zone });
    } catch {
      return new Intl.DateTimeFormat(language, style); // a zone that this browser does not know
    }
  }

  function format(style) {
    if (!formats.has(style)) formats.set(style, make(STYLES[style]));
    return formats.get(style);
  }

  function ago(at) {
    const seconds = (at - Date.now()) / 1000;
    const relative = new Intl.RelativeTimeFormat(language, { numeric: "auto" });
    for (const [unit, length] of UNITS) {
      if (Math.abs(seconds) >= length) return relative.format(Math.trunc(seconds / length), unit);
    }
    return relative.format(0, "second");
  }

  function words({ dateTime, dataset }) {
    const at = new Date(dateTime);
    if (Number.isNaN(at.getTime())) return null;
    if (dataset.style === "ago") return ago(at);
    if (dataset.style === "span") return written(format("span").formatRangeToParts(at, new Date(dataset.end)));
    return STYLES[dataset.style] ? written(format(dataset.style).formatToParts(at)) : null;
  }

  function show() {
    for (const node of document.querySelectorAll("time[data-style]")) {
      const text = words(node);
      if (text !== null && node.textContent !== text) node.textContent = text;
    }
  }

  // The portal keeps the zone with the account: the calendar and mails are by the same clocks.
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  const secure = location.protocol === "https:" ? "; Secure" : "";
  if (zone) document.cookie = `carme_zone=${zone}; Path=/; SameSite=Lax; Max-Age=31536000${secure}`;

  show();
  setInterval(show, RENEW_MS);
  document.addEventListener("htmx:after:swap", show);
})();
