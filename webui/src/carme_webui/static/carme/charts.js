// Charts: <carme-chart data-chart="JSON"> draws one with uPlot, with axes, the values under the pointer or the arrow
// keys, and a table of all of them: lines over time, lines over amounts that double, or stacks of parts side by side.
// <carme-sparks data-job="7"> shows a job's last minutes.
// What is drawn lies in a shadow tree, so that a part of the page that is renewed leaves it as it is.
"use strict";

(() => {
  const STYLE = document.currentScript.dataset.style;
  // Distinguished with any kind of colour vision, and by the strokes of the lines as well. Okabe and Ito's colours,
  // on white the darker of them: https://jfly.uni-koeln.de/color/
  const ON_LIGHT = ["#0072b2", "#c04a00", "#00785a", "#a83279", "#6f5500", "#3f3f9f", "#555555", "#007f8a"];
  const ON_DARK = ["#56b4e9", "#e69f00", "#2fc79b", "#ee8cc0", "#f0e442", "#a9a9ff", "#c8c8c8", "#5fd6de"];
  const STROKES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
  const HEIGHT = 170;
  const SPARK_HEIGHT = 34;
  const ACROSS_HEIGHT = 30; // of the lower axis, with its ticks and one line of letters
  const LABEL_WIDTH = 58; // of a stack, in pixels; narrower ones are named in part
  const MARK_HEIGHT = 14; // of a point's name, with a little room
  const DAY = 86400;
  // Of a chart on paper, in pixels: A4 and Letter have so many between their margins and those of the page. How wide
  // the paper is no browser says; the style sheet scales what is drawn to it.
  const PAPER_WIDTH = 650;
  const POLL_MS = 15000;
  const MOST_ROUNDED = 1000; // as in metrics/charts.py
  // The portal's language, which in JupyterLab the script's element has. English as the portal writes it: the day
  // before the month, the hours from 0 to 23.
  const language = (document.currentScript.lang || document.documentElement.lang).replace(/^en$/, "en-GB") || undefined;
  // English months have three letters, as on the server, where British English has "Sept".
  const written = (parts) =>
    parts.map(({ type, value }) => (type === "month" && language === "en-GB" ? value.slice(0, 3) : value)).join("");
  // As in times.js: the browser's clock, or that of the zone that the user has chosen.
  const zone = knownZone(document.documentElement.dataset.zone);
  const drawn = new Set();
  let printing = matchMedia("print").matches;

  const make = (tag, properties = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  };

  function knownZone(name) {
    try {
      new Intl.DateTimeFormat(undefined, { timeZone: name });
      return name;
    } catch {
      return undefined; // a zone that this browser does not know
    }
  }

  // A date whose parts (hours, minutes ...) are those that the clocks of the zone show.
  const local = (seconds) => (zone ? uPlot.tzDate(new Date(seconds * 1000), zone) : new Date(seconds * 1000));

  // A shadow tree with the charts' own style sheet, which is seen once that is there.
  function shadow(host) {
    const root = host.attachShadow({ mode: "open" });
    const link = make("link", { rel: "stylesheet", href: STYLE });
    host.style.visibility = "hidden";
    for (const event of ["load", "error"]) link.addEventListener(event, () => (host.style.visibility = ""));
    root.append(link);
    return root;
  }

  // How bright a colour is, 0 to 255, as eyes weigh red, green and blue.
  function brightness(colour) {
    const [red, green, blue] = (colour.match(/[\d.]+/g) ?? [0, 0, 0]).map(Number);
    return 0.299 * red + 0.587 * green + 0.114 * blue;
  }

  // The text's colour says whether the page is dark: here and in JupyterLab.
  function colours(host) {
    const text = printing ? "rgb(20, 20, 20)" : getComputedStyle(host).color;
    const dark = brightness(text) > 127;
    const shades = dark ? { lines: ON_DARK, rest: "#5b6672", paper: "#10181c" } : { lines: ON_LIGHT, rest: "#b3bcc4", paper: "#ffffff" };
    return { text, ...shades, grid: dark ? "rgba(255, 255, 255, .16)" : "rgba(0, 0, 0, .12)" };
  }

  const clock = (seconds, options) =>
    written(new Intl.DateTimeFormat(language, { hourCycle: "h23", timeZone: zone, ...options }).formatToParts(new Date(seconds * 1000)));

  function moment(seconds, span) {
    const options = { hour: "2-digit", minute: "2-digit" };
    if (span < 3600) options.second = "2-digit";
    if (span > DAY / 2) Object.assign(options, { weekday: "short", day: "numeric", month: "short" });
    return clock(seconds, options);
  }

  const amount = (value, unit) => {
    if (value === null || value === undefined) return "–";
    const digits = Math.abs(value) < MOST_ROUNDED ? { maximumSignificantDigits: 3 } : { maximumFractionDigits: 0 };
    const text = new Intl.NumberFormat(language, digits).format(value);
    return unit ? `${text}\u00a0${unit}` : text;
  };

  // What a moment on an axis is called, with `step` seconds to the next one, of `span` seconds in all.
  function tickWords(at, step, span) {
    const time = local(at);
    if (step >= DAY || (span > DAY / 2 && time.getHours() === 0 && time.getMinutes() === 0))
      return clock(at, { weekday: "short", day: "numeric" });
    return clock(at, { hour: "2-digit", minute: "2-digit", ...(step < 60 && { second: "2-digit" }) });
  }

  // Put a table into what opens and closes it, in place of the one that is there; where one reads in it stays.
  function fillTable(details, title, head, rows) {
    const top = make("tr", {}, ...head.map((textContent) => make("th", { scope: "col", textContent })));
    const body = rows.map(([name, ...values]) =>
      make("tr", {}, make("th", { scope: "row", textContent: name }), ...values.map((textContent) => make("td", { textContent }))),
    );
    const table = make("table", {}, make("caption", { className: "unseen", textContent: title }), make("thead", {}, top), make("tbody", {}, ...body));
    const box = details.querySelector(".scroll") ?? make("div", { className: "scroll", tabIndex: 0 });
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", title);
    box.replaceChildren(table);
    if (!box.isConnected) details.append(box);
  }

  // A drawing in `place`, read by pointer and arrow keys. It is drawn anew when its specification changes, which is JSON in
  // the attribute that is observed, and when the page's colours do. Each kind of drawing has `build`, which appends its parts,
  // `draw`, `fit` to another width, `last`, the number of its last part, and `go` to one of them, which returns what that is.
  class Drawing extends HTMLElement {
    sizes = new ResizeObserver(() => this.fit());

    connectedCallback() {
      if (!this.shadowRoot) {
        const root = shadow(this);
        this.place = make("div");
        this.place.setAttribute("role", "img");
        this.place.addEventListener("keydown", (event) => this.step(event));
        this.status = make("p", { className: "unseen", role: "status" });
        this.build(root);
      }
      drawn.add(this);
      this.sizes.observe(this);
      this.draw();
    }

    disconnectedCallback() {
      drawn.delete(this);
      this.sizes.disconnect();
    }

    attributeChangedCallback() {
      if (this.isConnected && this.shadowRoot) this.draw();
    }

    // Take up the specification; whether it can be read. One of another version of the portal cannot, and the page that comes
    // next has it.
    specify() {
      try {
        this.spec = JSON.parse(this.getAttribute(this.constructor.observedAttributes[0]) ?? "");
      } catch {
        return false;
      }
      this.place.setAttribute("aria-label", `${this.spec.title}: ${this.spec.summary}`);
      return true;
    }

    // Left and right go from one part to the next, Home and End to the first and the last.
    step(event) {
      const { reached, last } = this; // not the pointer's place, as two may lie on each other
      const to = { ArrowLeft: reached - 1, ArrowRight: reached + 1, Home: 0, End: last }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.status.textContent = this.go(Math.min(last, Math.max(0, to)));
    }
  }

  class Chart extends Drawing {
    static observedAttributes = ["data-chart"];

    disconnectedCallback() {
      super.disconnectedCallback();
      this.plot?.destroy();
      this.plot = null;
    }

    build(root) {
      this.place.className = "plot";
      this.legend = make("ul", { className: "legend" });
      this.table = make("details", { className: "figures" });
      this.table.addEventListener("toggle", () => this.fill());
      root.append(this.place, this.legend, this.status, this.table);
    }

    // Whether parts stand upon each other, and not lines beside each other.
    get stacks() {
      return !!this.spec.labels && !this.spec.at;
    }

    get width() {
      return Math.max(60, printing && !this.spec.spark ? PAPER_WIDTH : this.place.clientWidth);
    }

    // The unit as far as the axis has room for it; the legend has it in any case.
    get short() {
      return this.spec.unit.length > 6 ? "" : this.spec.unit;
    }

    get span() {
      return this.spec.step * Math.max(1, this.times.length - 1);
    }

    // Draw it anew. Where only the numbers differ, the place under the pointer stays.
    draw(all = false) {
      const before = this.spec;
      if (!this.specify()) return;
      const { spec } = this;
      const length = Math.max(0, ...spec.series.map((line) => line.values.length));
      this.times = spec.at ?? Array.from({ length }, (_, place) => (spec.labels ? place : spec.start + place * spec.step));
      this.lines = spec.series.map((line, place) => ({ ...line, place: line.role === "edge" ? 0 : place, dash: this.dash(line.role, place) }));
      if (spec.line) this.lines.push({ name: spec.line.name, values: Array(length).fill(spec.line.value), limit: true });
      this.drawn = this.stacks ? this.stacked() : this.lines;
      const rows = [this.times, ...this.drawn.map((line) => line.values)];
      this.label();
      const same = before && before.spark === spec.spark && before.series.map((line) => line.name).join() === spec.series.map((line) => line.name).join();
      if (this.plot && same && !all && !!before.line === !!spec.line) {
        this.plot.setData(rows);
        if (before.current !== spec.current) this.plot.setCursor({ left: -10, top: -10 }); // it shows the new choice
      } else {
        this.plot?.destroy();
        this.palette = colours(this);
        this.plot = new uPlot(this.options(), rows, this.place);
      }
      this.read(null);
      this.fill();
    }

    dash(role, place) {
      if (role === "edge") return [];
      return role === "other" ? STROKES[1 + (place % 3)] : STROKES[place % STROKES.length];
    }

    // Each part upon those before it; the highest is drawn first, and the others over it.
    stacked() {
      const below = Array(this.times.length).fill(0);
      const parts = this.lines
        .filter((line) => !line.limit)
        .map((line) => ({ ...line, values: line.values.map((value, at) => (line.total ? value : value ? (below[at] += value) : null)) }));
      return [...parts.reverse(), ...this.lines.filter((line) => line.limit)];
    }

    label() {
      const { spec } = this;
      if (spec.spark) {
        this.legend.hidden = this.table.hidden = true;
      } else {
        this.place.tabIndex = 0;
        this.table.firstElementChild ?? this.table.append(make("summary"));
        this.table.firstElementChild.textContent = spec.words.table;
      }
    }

    colour(line) {
      if (line.limit || line.role === "other") return this.palette.text;
      return line.rest ? this.palette.rest : this.palette.lines[line.place % this.palette.lines.length];
    }

    // What a place on the axis is called.
    called(at) {
      return this.spec.labels ? this.spec.labels[at] : moment(this.times[at], this.span);
    }

    // The lower axis: moments, or the stacks' names as far as there is room.
    across(axis) {
      axis = { ...axis, size: ACROSS_HEIGHT };
      if (this.spec.at) return { ...axis, label: this.spec.words.time, labelSize: 18, labelFont: axis.font, splits: () => this.times, filter: (_plot, splits) => splits, values: (plot, splits) => this.apart(plot, splits) };
      if (!this.spec.labels)
        return { ...axis, values: (_plot, splits, _axis, _space, step) => splits.map((at) => this.tick(at, step)) };
      return {
        ...axis,
        grid: { show: false },
        splits: () => this.times,
        values: (plot, splits) => {
          const every = this.every(plot);
          return splits.map((at) => (at % every ? "" : this.spec.labels[at]));
        },
      };
    }

    // Of how many stacks side by side one is named: new numbers may come with longer names.
    every(plot) {
      const label = Math.max(LABEL_WIDTH, ...this.spec.labels.map((words) => 10 + 6.5 * words.length));
      return Math.max(1, Math.ceil((this.times.length * label) / Math.max(1, plot.width - 92)));
    }

    // Amounts as far as they do not lie on each other.
    apart(plot, splits) {
      let last = -Infinity;
      return splits.map((at) => {
        const to = plot.valToPos(at, "x");
        if (to - last < 26) return "";
        last = to;
        return amount(at, "");
      });
    }

    seriesOptions(line) {
      const { spec } = this;
      const shape = { label: line.name, stroke: this.colour(line), width: line.limit ? 1.5 : 2, dash: line.limit ? [4, 4] : line.dash };
      if (spec.at) {
        const points = line.role ? { show: false } : { show: true, size: 7, fill: this.colour(line) };
        return { ...shape, width: line.role ? 1.2 : 2, points };
      }
      if (spec.labels && !line.limit)
        return { ...shape, stroke: this.palette.paper, width: 1, dash: [], fill: this.colour(line), paths: uPlot.paths.bars({ size: [0.7, 72] }), points: { show: false } };
      return {
        ...shape,
        fill: spec.spark && !line.limit && spec.series.length === 1 ? `${this.colour(line)}33` : undefined,
        paths: spec.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
        points: { show: !spec.labels && line.values.filter((value) => value !== null).length === 1 },
      };
    }

    options() {
      const { spec, palette } = this;
      const font = "12px system-ui, sans-serif";
      const axis = { stroke: palette.text, font, grid: { stroke: palette.grid, width: 1 }, ticks: { stroke: palette.grid, width: 1 } };
      return {
        width: this.width,
        height: spec.at ? HEIGHT + 50 : spec.height ?? (spec.spark ? SPARK_HEIGHT : HEIGHT),
        tzDate: local,
        padding: spec.spark ? [3, 1, 3, 1] : [10, 20, 0, 0],
        legend: { show: false },
        cursor: { show: !spec.spark, y: false, drag: { x: false, y: false }, points: { size: 7 } },
        scales: this.scales,
        bands: spec.at ? [{ series: [3, 2], fill: `${palette.lines[0]}2e` }] : [],
        axes: spec.spark
          ? [{ show: false }, { show: false }]
          : [
              this.across(axis),
              { ...axis, size: 72, values: (_plot, splits) => splits.map((value) => amount(value, this.short)), ...(spec.at && { size: 46, splits: (plot) => this.doubles(plot), filter: (_plot, splits) => splits }) },
            ],
        series: [
          {},
          ...this.drawn.map((line) => this.seriesOptions(line)),
        ],
        hooks: { setCursor: [(plot) => this.read(plot.cursor.idx, true)], draw: spec.at ? [(plot) => this.mark(plot)] : [] },
      };
    }

    get scales() {
      if (this.spec.at) {
        const doubling = (range) => ({ time: false, distr: 3, log: 2, range });
        const values = () => this.lines.flatMap((line) => line.values);
        return {
          x: doubling(() => [this.times[0] / 1.15, Math.max(this.times[0] * 2, this.times.at(-1)) * 1.15]),
          y: doubling(() => [Math.min(...values()) / 1.15, Math.max(...values()) * 1.15]),
        };
      }
      const x = this.stacks ? { time: false, range: () => [-0.5, this.times.length - 0.5] } : {};
      return { x, y: { range: (_plot, low, high) => this.bounds(low ?? 0, high ?? 0) } };
    }

    // Powers of two within the vertical axis.
    doubles({ scales: { y } }) {
      const found = [];
      for (let at = 2 ** Math.ceil(Math.log2(y.min)); at <= y.max; at *= 2) found.push(at);
      return found;
    }

    // A ring around the chosen point, and what points are: below them where the line rises, or above.
    mark(plot) {
      const { ctx } = plot;
      const { values } = this.lines[0];
      const { left, width } = plot.bbox;
      const ratio = uPlot.pxRatio;
      ctx.save();
      ctx.setLineDash([]);
      ctx.font = `600 ${12 * ratio}px system-ui, sans-serif`;
      ctx.textBaseline = "middle";
      for (const { place, words, chosen } of this.spec.marks) {
        const [x, y] = [plot.valToPos(this.times[place], "x", true), plot.valToPos(values[place], "y", true)];
        if (chosen) {
          ctx.beginPath();
          ctx.arc(x, y, 8 * ratio, 0, 2 * Math.PI);
          ctx.lineWidth = 2.5 * ratio;
          ctx.strokeStyle = this.palette.text;
          ctx.stroke();
        }
        const long = ctx.measureText(words).width + 10 * ratio;
        const below = values[place + 1] > values[place] && x + long < left + width;
        const before = !below && x - long > left;
        ctx.textAlign = before ? "right" : "left";
        const to = [x + (before ? -8 : 8) * ratio, y + (below ? 1 : -1) * MARK_HEIGHT * ratio];
        // Legible on lines as well.
        ctx.lineWidth = 4 * ratio;
        ctx.strokeStyle = this.palette.paper;
        ctx.strokeText(words, ...to);
        ctx.fillStyle = this.palette.text;
        ctx.fillText(words, ...to);
      }
      ctx.restore();
    }

    // Of the vertical axis: 0 is on it, and of nothing but zeros it shows 0 to 1.
    bounds(low, high) {
      const most = high > 0 ? high * 1.05 : low < 0 ? 0 : 1;
      return [Math.min(0, low), this.spec.most ?? most];
    }

    tick(at, step) {
      return tickWords(at, step, this.span);
    }

    fit() {
      const { width } = this;
      if (this.plot && !printing && this.place.clientWidth > 0 && width !== this.plot.width)
        this.plot.setSize({ width, height: this.plot.height });
    }

    // The place that is shown until the reader points at another: the last line, or today's.
    get current() {
      return this.spec.current ?? this.last;
    }

    // The values at a place, or the current ones; `together`: and at those that lie above or below it, such as another
    // choice with as many GPUs.
    read(place, together = false) {
      if (this.spec.spark || !this.plot) return;
      const at = (this.reached = place ?? this.current);
      const places = together && this.spec.at && place != null ? [...this.times.keys()].filter((index) => this.times[index] === this.times[at]) : [at];
      this.legend.replaceChildren(...places.flatMap((index) => this.entries(index)));
    }

    // What the legend says of a place: its name, and the value of each line.
    entries(at) {
      const { spec } = this;
      const entries = this.lines.map((line) => {
        const key = make("span", { className: this.stacks && !line.limit ? "key block" : line.role ? "key thin" : "key" });
        key.style.borderTopColor = this.colour(line);
        const stroke = line.dash?.[0] === 2 ? "dotted" : "dashed";
        key.style.borderTopStyle = line.limit || (line.dash?.length && !this.stacks) ? stroke : "solid";
        return make("li", {}, key, `${line.name}: `, make("b", { textContent: amount(line.values[at], spec.unit) }));
      });
      const time = make("li", { className: "moment", textContent: at < 0 ? "" : this.called(at) });
      return [time, ...entries];
    }

    get last() {
      return this.times.length - 1;
    }

    go(at) {
      this.plot.setCursor({ left: this.plot.valToPos(this.times[at], "x"), top: 10 });
      this.read(at);
      return this.legend.textContent;
    }

    // The table is made when somebody opens it.
    fill() {
      if (!this.table.open || !this.spec) return;
      const { spec } = this;
      const head = [spec.words.time, ...this.lines.map((line) => line.name)];
      const rows = this.times.map((_at, place) => [this.called(place), ...this.lines.map((line) => amount(line.values[place], spec.unit))]);
      fillTable(this.table, spec.title, head, rows);
    }
  }

  // --- sparklines: one request for all that runs ------------------------------------------------------------

  let latest = null;

  class Sparks extends HTMLElement {
    connectedCallback() {
      if (!this.shadowRoot) this.build();
      this.show();
    }

    build() {
      this.table = make("details", { className: "figures" }, make("summary"));
      this.table.addEventListener("toggle", () => this.fill());
      shadow(this).append(this.table);
    }

    show() {
      const found = latest?.jobs[this.dataset.job];
      this.hidden = !found;
      if (!found) return;
      const figures = [...this.shadowRoot.querySelectorAll("figure")];
      found.charts.forEach((spec, place) => {
        const figure = figures[place] ?? make("figure", {}, make("figcaption"), make("carme-chart"));
        figure.querySelector("figcaption").replaceChildren(`${spec.title} `, make("b", { textContent: spec.now }));
        figure.querySelector("carme-chart").dataset.chart = JSON.stringify(spec);
        if (!figure.isConnected) this.table.before(figure);
      });
      for (const figure of figures.slice(found.charts.length)) figure.remove();
      this.shadowRoot.querySelector("p")?.remove();
      if (found.words) this.table.before(make("p", { textContent: found.words }));
      this.table.hidden = !found.charts.length;
      this.table.firstElementChild.textContent = found.table.title;
      this.fill();
    }

    // One table of all of them: they have the same moments.
    fill() {
      const found = latest?.jobs[this.dataset.job];
      if (!this.table.open || !found?.charts.length) return;
      const { charts, table } = found;
      const [{ start, step, series }] = charts;
      const last = series[0].values.length - 1;
      const rows = series[0].values.map((_value, place) => [
        moment(start + place * step, step * last),
        ...charts.map((spec) => amount(spec.series[0].values[place], spec.unit)),
      ]);
      const titles = charts.map((spec) => spec.title);
      fillTable(this.table, titles.join(", "), [table.time, ...titles], rows);
    }
  }

  async function ask(place) {
    if (document.hidden) return;
    try {
      const answer = await fetch(place.dataset.url, { headers: { Accept: "application/json" }, redirect: "error" });
      if (!answer.ok) return;
      latest = await answer.json();
    } catch {
      return; // the next question may be answered
    }
    place.textContent = latest.failure;
    place.hidden = !latest.failure;
    for (const sparks of document.querySelectorAll("carme-sparks")) sparks.show();
  }

  function redraw() {
    for (const chart of drawn) chart.draw(true);
  }

  // For paper, or for the screen again, whose sizes are there once the page is drawn anew.
  function print(now) {
    if (printing === now) return;
    printing = now;
    redraw();
    if (!now) requestAnimationFrame(() => drawn.forEach((chart) => chart.fit()));
  }

  customElements.define("carme-chart", Chart);
  // For spans.js, whose bars have the same clocks and are drawn anew at the same times.
  window.carmeCharts = { DAY, Drawing, clock, local, make, tickWords, paperWidth: () => (printing ? PAPER_WIDTH : 0) };
  customElements.define("carme-sparks", Sparks);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  // JupyterLab's themes are its own, whatever the browser prefers.
  new MutationObserver(redraw).observe(document.body, { attributeFilter: ["data-jp-theme-light"] });
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  // A preview of paper on the screen has no such events.
  matchMedia("print").addEventListener("change", ({ matches }) => print(matches));
  const place = document.getElementById("sparks");
  if (place) {
    ask(place);
    setInterval(() => ask(place), POLL_MS);
    document.addEventListener("visibilitychange", () => ask(place));
  }
})();
