// The calendar by keyboard and by drawing. Without it every free cell is a plain link to the form.
"use strict";

const calendar = document.getElementById("calendar");

// What arrow keys stop at: free times, and what nodes are kept for, also where that has no page.
const STOPS = "a, .item";

function links() {
  return [...calendar.querySelectorAll("tbody :is(a, .item)")];
}

// One stop for the tab key; arrow keys move within the calendar.
function rove(to) {
  for (const link of links()) link.tabIndex = -1;
  to.tabIndex = 0;
}

function middle(link) {
  const box = link.getBoundingClientRect();
  return box.left + box.width / 2;
}

function neighbour(link, key) {
  const row = link.closest("tr");
  if (key === "ArrowLeft" || key === "ArrowRight") {
    const inRow = [...row.querySelectorAll(STOPS)];
    return inRow[inRow.indexOf(link) + (key === "ArrowRight" ? 1 : -1)];
  }
  let next = key === "ArrowDown" ? row.nextElementSibling : row.previousElementSibling;
  while (next && !next.querySelector(STOPS)) next = key === "ArrowDown" ? next.nextElementSibling : next.previousElementSibling;
  const near = next ? [...next.querySelectorAll(STOPS)] : [];
  return near.sort((a, b) => Math.abs(middle(a) - middle(link)) - Math.abs(middle(b) - middle(link)))[0];
}

// The free cells from one to another of the same node; none if something lies between.
function between(first, last) {
  const cells = [...first.closest("tr").cells];
  const ends = [first, last].map((link) => cells.indexOf(link.closest("td"))).sort((a, b) => a - b);
  if (ends[0] < 0) return [];
  const chosen = cells.slice(ends[0], ends[1] + 1).map((cell) => cell.querySelector("a.free"));
  return chosen.every(Boolean) ? chosen : [];
}

let anchor = null;

function mark(chosen) {
  for (const link of calendar.querySelectorAll("a.chosen")) link.classList.remove("chosen");
  for (const link of chosen) link.classList.add("chosen");
}

function open(chosen) {
  const minutes = chosen.length * Number(calendar.dataset.minutes);
  // The row that was drawn over is the node that is booked.
  const node = new URL(chosen[0].href).searchParams.get("node");
  const query = new URLSearchParams({ kind: calendar.dataset.kind, start: chosen[0].dataset.start, minutes, node });
  location.assign(`${calendar.dataset.new}?${query}`);
}

function chosen() {
  return [...calendar.querySelectorAll("a.chosen")];
}

if (calendar) {
  const first = calendar.querySelector("tbody a.free") ?? links()[0];
  if (first) rove(first);
  // A day begins with the night; what is now is what one looks for.
  const now = calendar.querySelector(".now");
  const box = calendar.closest(".table-scroll");
  if (now) box.scrollLeft = now.offsetLeft - box.clientWidth / 2;
  calendar.addEventListener("focusin", (event) => {
    const link = event.target.closest("tbody :is(a, .item)");
    if (link) rove(link);
  });
  calendar.addEventListener("keydown", (event) => {
    const link = event.target.closest("tbody :is(a, .item)");
    if (!link) return;
    if (event.key === "Enter" && chosen().length > 1) {
      event.preventDefault();
      open(chosen());
    } else if (event.key === "Escape") {
      anchor = null;
      mark([]);
    } else if (event.key.startsWith("Arrow")) {
      const next = neighbour(link, event.key);
      if (!next) return;
      event.preventDefault();
      if (event.shiftKey && link.matches(".free") && next.matches(".free") && next.closest("tr") === link.closest("tr")) {
        anchor ??= link;
        const span = between(anchor, next);
        if (!span.length) return;
        mark(span);
      } else if (!event.shiftKey) {
        anchor = null;
        mark([]);
      }
      next.focus();
    }
  });
  let drawing = null;
  calendar.addEventListener("pointerdown", (event) => {
    // On a touch screen drawing scrolls; there a tap opens the form.
    drawing = event.pointerType === "mouse" && event.button === 0 ? event.target.closest("a.free") : null;
  });
  calendar.addEventListener("dragstart", (event) => event.preventDefault());
  calendar.addEventListener("pointermove", (event) => {
    const over = drawing && event.target.closest("a.free");
    if (over && over !== drawing && over.closest("tr") === drawing.closest("tr")) mark(between(drawing, over));
  });
  addEventListener("pointerup", () => {
    if (drawing && chosen().length > 1) open(chosen());
    drawing = null;
  });
}
