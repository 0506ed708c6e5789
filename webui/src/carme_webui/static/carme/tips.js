// What a mark means, for pointer, keyboard and touch alike: elements with data-tip, and the calendar's entries, show it
// while one points at them or the focus is on them; Escape hides it until pointer or focus has left the mark. In a
// table with data-grid, arrow keys move.
"use strict";

(() => {
  const MARKED = "[data-tip], .calendar .item, .calendar a.free";
  const GAP = 6; // pixels between a mark and what it means
  const tip = document.createElement("div");
  tip.className = "tip";
  // Screen readers find the same in the page itself.
  tip.setAttribute("aria-hidden", "true");
  tip.setAttribute("popover", "manual");
  let marked = null;
  let dismissed = null; // the mark whose tip Escape has hidden
  let pointer = {}; // where it was last

  function hide() {
    marked = null;
    if (tip.isConnected) tip.remove();
  }

  function show(mark) {
    const text = mark.dataset.tip ?? mark.textContent.trim();
    if (mark === marked && tip.textContent === text) return;
    if (!text) return hide();
    marked = mark;
    tip.textContent = text;
    document.body.append(tip);
    tip.showPopover?.();
    place();
  }

  // Beside its mark, which may have moved; nowhere when that is out of sight.
  function place() {
    if (!marked) return;
    const at = marked.getBoundingClientRect();
    if (!marked.isConnected || at.bottom < 0 || at.top > innerHeight) return hide();
    const size = tip.getBoundingClientRect();
    const below = at.bottom + GAP + size.height <= innerHeight;
    tip.style.top = `${Math.max(0, below ? at.bottom + GAP : at.top - GAP - size.height)}px`;
    tip.style.left = `${Math.max(GAP, Math.min(at.left, innerWidth - size.width - GAP))}px`;
  }

  const markOf = (event) => (event.target instanceof Element ? event.target.closest(MARKED) : null);
  const focused = () => document.activeElement?.closest(MARKED) ?? null;

  // Browsers report a pointer that rests, too, when the page moves or changes below it: nobody has requested it.
  function point(event) {
    const rests = event.pointerType === "mouse" && event.clientX === pointer.x && event.clientY === pointer.y;
    pointer = { x: event.clientX, y: event.clientY };
    if (rests) return;
    const pointed = markOf(event);
    if (dismissed !== pointed && dismissed !== focused()) dismissed = null;
    const mark = pointed ?? focused();
    if (mark && mark === dismissed) return;
    if (mark) show(mark);
    else if (!tip.contains(event.target)) hide();
  }

  document.addEventListener("pointerover", point);
  document.addEventListener("pointermove", point, { passive: true });
  document.addEventListener("focusin", (event) => {
    const mark = markOf(event);
    if (mark) show(mark);
    else hide();
  });
  document.addEventListener("focusout", () => {
    dismissed = null;
    hide();
  });
  addEventListener("scroll", place, { capture: true, passive: true });
  document.addEventListener("htmx:after:swap", renew);

  // Tab comes back to this cell of its table.
  function reach(cell) {
    for (const candidate of cell.closest("table").querySelectorAll("td[tabindex]")) candidate.tabIndex = candidate === cell ? 0 : -1;
  }

  // What the portal has sent anew has its own tabindex, and may mean something else.
  function renew() {
    const cell = document.activeElement?.closest("[data-grid] td[tabindex]");
    if (cell) reach(cell);
    if (!marked) return;
    if (!marked.isConnected || !marked.matches(MARKED)) return hide();
    show(marked);
    place();
  }

  function neighbour(cell, key) {
    const row = cell.closest("tr");
    const place = [...row.cells].indexOf(cell);
    const targets = {
      ArrowLeft: [row, place - 1],
      ArrowRight: [row, place + 1],
      ArrowUp: [row.previousElementSibling, place],
      ArrowDown: [row.nextElementSibling, place],
      Home: [row, [...row.cells].findIndex((candidate) => candidate.hasAttribute("tabindex"))],
      End: [row, [...row.cells].findLastIndex((candidate) => candidate.hasAttribute("tabindex"))],
    };
    const found = targets[key]?.[0]?.cells[targets[key][1]];
    return found?.hasAttribute("tabindex") ? found : null;
  }

  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (event.key === "Escape" && marked) {
      dismissed = marked;
      return hide();
    }
    const cell = event.target instanceof Element ? event.target.closest("[data-grid] td[tabindex]") : null;
    const to = cell && neighbour(cell, event.key);
    if (!to) return;
    event.preventDefault();
    reach(to);
    to.focus();
  });
})();
