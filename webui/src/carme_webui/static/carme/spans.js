// Bars over time: <carme-spans data-spans="JSON"> draws rows of them with an axis by the reader's clocks, and the exact
// times of the bar under the pointer or the arrow keys. The table of all of them is the page's own, beside it.
"use strict";

(() => {
  const { DAY, Drawing, clock, local, make, tickWords, paperWidth } = window.carmeCharts;
  // Seconds between two moments on the axis of bars: the first of these that leaves room for the labels is taken.
  const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, DAY, 2 * DAY, 7 * DAY, 14 * DAY, 28 * DAY, 91 * DAY, 364 * DAY];
  const TICK_WIDTH = 76; // of a moment's words there, in pixels

  // Moments at full minutes, hours or days of the reader's clocks, at most one more than so many.
  function moments(from, to, most) {
    const step = STEPS.find((seconds) => (to - from) / seconds <= most) ?? STEPS.at(-1);
    let at = Math.ceil((from + ahead(from)) / step) * step - ahead(from);
    if (ahead(at) !== ahead(from)) at = following(at - step, step);
    const found = [];
    for (; at <= to; at = following(at, step)) found.push(at);
    return { step, found };
  }

  // By how many seconds the reader's clocks are ahead of UTC at a moment.
  function ahead(at) {
    const shown = local(at);
    const parts = [shown.getFullYear(), shown.getMonth(), shown.getDate(), shown.getHours(), shown.getMinutes(), shown.getSeconds()];
    return Date.UTC(...parts) / 1000 - Math.floor(at);
  }

  // The next full moment of those clocks after one; where summer time begins or ends between them, by the new time.
  function following(at, step) {
    const next = at + step;
    const later = ahead(next);
    if (later === ahead(at)) return next;
    let shifted = (Math.floor((at + later) / step) + 1) * step - later;
    while (ahead(shifted) !== later) shifted += step;
    return shifted;
  }

  // A moment to the second, with its day where that may be another one.
  function exact(at, span) {
    const options = { hour: "2-digit", minute: "2-digit", second: "2-digit" };
    const far = span > DAY / 2 || Math.abs(Date.now() / 1000 - at) > DAY / 2;
    return clock(at, far ? { weekday: "short", day: "numeric", month: "short", ...options } : options);
  }

  class Spans extends Drawing {
    static observedAttributes = ["data-spans"];

    build(root) {
      Object.assign(this.place, { className: "spans", tabIndex: 0 });
      this.pointed = make("p", { className: "pointed" });
      this.place.addEventListener("pointermove", (event) => this.point(event), { passive: true });
      this.place.addEventListener("pointerdown", (event) => this.point(event), { passive: true });
      this.place.addEventListener("pointerleave", () => this.rest());
      root.append(this.place, this.pointed, this.status);
    }

    draw() {
      if (!this.specify()) return;
      const { rows } = this.spec;
      const all = rows.flatMap((row) => row.spans);
      this.from = this.spec.start ?? Math.min(...all.map((span) => span.start));
      this.to = Math.max(this.from + 1, ...all.map((span) => span.end));
      this.ticks = make("div", { className: "ticks" });
      this.ticks.style.gridRow = `1 / ${rows.length + 2}`;
      this.bars = [];
      const parts = rows.flatMap((row, place) => {
        const track = make("div", { className: "track" });
        const name = make("span", { className: "name", textContent: row.title });
        for (const node of [track, name]) node.style.gridRow = `${place + 1}`;
        for (const span of row.spans) {
          const bar = make("i", { className: `span ${span.kind}` });
          bar.style.left = `${this.share(span.start)}%`;
          bar.style.width = `${this.share(span.end) - this.share(span.start)}%`;
          track.append(bar);
          this.bars.push({ bar, track, span, row: row.title });
        }
        return [name, track];
      });
      this.place.replaceChildren(this.ticks, ...parts);
      this.fit();
      const pointed = this.reached < this.last && (this.place.matches(":hover") || this.shadowRoot.activeElement);
      if (pointed) this.read(this.reached);
      else this.rest();
    }

    get last() {
      return this.bars.length - 1;
    }

    // The last bar stands below the axis until one points at another.
    rest() {
      this.read(this.last);
      this.bars.at(-1).bar.classList.remove("reached");
    }

    // Of the whole time, in percent.
    share(at) {
      return (100 * (at - this.from)) / (this.to - this.from);
    }

    // The axis, with as many moments as there is room for.
    fit() {
      if (!this.spec) return;
      const width = (paperWidth() || this.place.clientWidth) - (this.place.clientWidth - this.ticks.clientWidth);
      const span = this.to - this.from;
      const { step, found } = moments(this.from, this.to, Math.max(1, Math.floor(width / TICK_WIDTH)));
      const nodes = found.map((at) => {
        const tick = make("span", { className: "tick" }, make("span", { textContent: tickWords(at, step, span) }));
        const place = this.share(at);
        tick.style.left = `${place}%`;
        if (place < 5) tick.classList.add("first");
        if (place > 95) tick.classList.add("last");
        return tick;
      });
      this.ticks.replaceChildren(...nodes);
    }

    // Which bar is meant: of those in its row the one that is nearest, as some are narrow.
    point(event) {
      const track = event.target.closest(".track");
      if (!track) return;
      const box = track.getBoundingClientRect();
      const at = this.from + ((event.clientX - box.left) / box.width) * (this.to - this.from);
      const away = ({ span }) => Math.max(span.start - at, at - span.end, 0);
      const own = this.bars.filter((bar) => bar.track === track);
      const near = own.reduce((best, bar) => (away(bar) < away(best) ? bar : best));
      this.read(this.bars.indexOf(near));
    }

    // What a bar is, with its exact times.
    read(place) {
      const found = this.bars[place];
      if (!found) return;
      this.reached = place;
      const { span, row } = found;
      const whole = this.to - this.from;
      const times = span.open ? `${this.spec.from} ${exact(span.start, whole)}` : `${exact(span.start, whole)} – ${exact(span.end, whole)}`;
      this.pointed.textContent = `${row}: ${span.label}, ${times}${span.words ? ` (${span.words})` : ""}`;
      for (const item of this.bars) item.bar.classList.toggle("reached", item === found);
    }

    go(place) {
      this.read(place);
      return this.pointed.textContent;
    }
  }

  customElements.define("carme-spans", Spans);
})();
