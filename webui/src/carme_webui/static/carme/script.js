// The script of a batch job: an editor in place of its text area (CodeMirror), and the form filled in from the
// script's #SBATCH lines, which the server reads. Without JavaScript the text area stays, and the server reads the
// lines when the job is submitted.
"use strict";

(() => {
  const area = document.getElementById("id_script");
  const found = document.getElementById("from-script");
  if (!area || !window.CodeMirror) return;
  const { Decoration, EditorView, HighlightStyle, MatchDecorator, StreamLanguage, ViewPlugin, tags } = CodeMirror;
  /** Milliseconds after the last key until the server reads the script. */
  const REST_MS = 600;

  const language = text => StreamLanguage.define(/^#!.*python/.test(text) ? CodeMirror.python : CodeMirror.shell);

  /** Lines for Slurm stand out, and the options in them. */
  const line = Decoration.mark({ class: "slurm" });
  const option = Decoration.mark({ class: "slurm-option" });
  const slurm = new MatchDecorator({
    regexp: /^#SBATCH\s.*$/g,
    decorate: (add, from, to, match) => {
      add(from, to, line);
      for (const word of match[0].matchAll(/\s(--?[a-zA-Z][\w-]*)/g)) {
        const at = from + word.index + 1;
        add(at, at + word[1].length, option);
      }
    },
  });
  const slurmLines = ViewPlugin.fromClass(
    class {
      constructor(view) {
        this.decorations = slurm.createDeco(view);
      }
      update(update) {
        this.decorations = slurm.updateDeco(update, this.decorations);
      }
    },
    { decorations: plugin => plugin.decorations },
  );

  // Colours of the page, which follow light and dark.
  const colours = HighlightStyle.define([
    { tag: tags.comment, color: "var(--soft)", fontStyle: "italic" },
    { tag: [tags.keyword, tags.standard(tags.variableName)], color: "var(--accent)", fontWeight: "600" },
    { tag: [tags.string, tags.special(tags.string)], color: "var(--good)" },
    { tag: [tags.number, tags.atom, tags.bool], color: "var(--wait)" },
    { tag: [tags.definition(tags.variableName), tags.attributeName, tags.meta], color: "var(--wait)" },
  ]);
  const theme = EditorView.theme({
    "&": { height: "100%", color: "var(--text)", backgroundColor: "var(--ground)", border: "1px solid var(--soft)", borderRadius: "7px", fontSize: ".875rem" },
    "&.cm-focused": { outline: "3px solid var(--focus)", outlineOffset: "2px" },
    ".cm-scroller": { fontFamily: 'ui-monospace, "DejaVu Sans Mono", "Liberation Mono", monospace', lineHeight: "1.5", overflow: "auto", borderRadius: "7px" },
    ".cm-content": { caretColor: "var(--text)", minHeight: "13rem" },
    ".cm-cursor": { borderLeftColor: "var(--text)" },
    ".cm-gutters": { backgroundColor: "transparent", color: "var(--soft)", border: "0" },
    "&.cm-focused > .cm-scroller > .cm-selectionLayer .cm-selectionBackground, .cm-selectionBackground": { backgroundColor: "color-mix(in srgb, var(--accent) 30%, transparent) !important" },
    ".slurm, .slurm *": { color: "var(--accent)", fontStyle: "normal" },
    ".slurm-option, .slurm-option *": { fontWeight: "700" },
  });

  let timer = null;
  const mode = new CodeMirror.Compartment();
  const first = text => text.slice(0, text.indexOf("\n") + 1 || undefined);

  function changed(update) {
    if (!update.docChanged) return;
    const text = update.state.doc.toString();
    if (first(text) !== first(area.value)) update.view.dispatch({ effects: mode.reconfigure(language(text)) });
    area.value = text;
    clearTimeout(timer);
    timer = setTimeout(() => area.dispatchEvent(new Event("change", { bubbles: true })), REST_MS);
  }

  const label = document.querySelector("label[for=id_script]");
  // A document of its own: the page's rules end here, and its policy allows such styles.
  const host = document.createElement("div");
  host.className = "editor";
  const root = host.attachShadow({ mode: "open" });
  const described = area.parentElement.querySelector(".errorlist, .help")?.textContent ?? "";
  const view = new EditorView({
    doc: area.value,
    root,
    parent: root,
    extensions: [
      ...[CodeMirror.lineNumbers(), CodeMirror.history(), CodeMirror.drawSelection(), CodeMirror.bracketMatching()],
      CodeMirror.keymap.of([...CodeMirror.defaultKeymap, ...CodeMirror.historyKeymap]),
      ...[mode.of(language(area.value)), CodeMirror.syntaxHighlighting(colours), slurmLines, theme],
      EditorView.contentAttributes.of({ "aria-label": label.textContent.trim(), "aria-description": described }),
      EditorView.updateListener.of(changed),
    ],
  });
  area.hidden = true;
  area.after(host);
  label.removeAttribute("for");
  label.addEventListener("click", () => view.focus());

  // What the user set is not set anew; what the script no longer asks for is as the server's form begins. A form that
  // is not as it begins (of a job that is submitted again, or of a browser that keeps it) is the user's own as it is.
  const begin = JSON.parse(document.getElementById("form-begin").textContent);
  const start = name => String(begin[name] ?? "");
  const fields = area.form.elements;
  const hidden = fields.own_fields;
  const own = new Set(hidden.value.split(" ").filter(Boolean));
  // The time is a choice, or hours and minutes; here, as for the script, all of it is minutes.
  const isTime = name => ["time", "hours", "minutes"].includes(name);
  const asks = field => field.name && "value" in field && field !== area && !["hidden", "submit"].includes(field.type);
  const differ = [...fields].filter(field => asks(field) && !isTime(field.name) && field.value !== start(field.name));
  const names = differ.map(field => field.name).concat(minutes() === start("minutes") ? [] : "minutes");
  /** What the script asks for, as the server read it last. */
  let requested = {};
  const filled = new Set();
  // A draft (drafts.js) names what is the user's own: the script had filled in the rest.
  for (const name of names) if (!own.has(name)) (area.form.dataset.draft ? filled : own).add(name);
  const nameOwn = () => (hidden.value = [...own].join(" "));
  nameOwn();
  area.form.addEventListener("input", event => {
    const { name } = event.target;
    if (!event.isTrusted || !name) return;
    own.add(isTime(name) ? "minutes" : name);
    nameOwn();
  });
  // An empty field is the script's again, which shows: Slurm would get it.
  area.form.addEventListener("change", event => {
    const { name, value } = event.target;
    if (value || !(name in requested) || name in begin) return;
    own.delete(name);
    nameOwn();
    set(name, requested[name]);
  }, true); // before a draft is kept

  function minutes() {
    const chosen = fields.time.value;
    return chosen === "custom" ? String(60 * fields.hours.value + Number(fields.minutes.value)) : chosen;
  }

  function setMinutes(value) {
    const offered = [...fields.time].some(choice => choice.value === String(value));
    fields.time.value = offered ? String(value) : "custom";
    fields.hours.value = Math.floor(value / 60);
    fields.minutes.value = value % 60;
  }

  function set(name, value) {
    const field = fields[name];
    if (!field || own.has(name)) return;
    filled.add(name);
    if (name === "minutes") return setMinutes(value);
    const before = field.value;
    field.value = value;
    if (field.value !== String(value)) field.value = before; // a choice that there is not: the server says so
  }

  // What the script filled in is sent as the form begins: the server reads the lines of the very script that it gets.
  // What the user set is named (`own_fields`), since it may be as the form begins and the script say otherwise.
  area.form.addEventListener("formdata", event => {
    for (const name of filled) if (!own.has(name)) event.formData.set(name, start(name));
    if (filled.has("minutes") && !own.has("minutes")) {
      event.formData.set("time", "custom");
      event.formData.set("hours", "");
    }
  });

  found.addEventListener("htmx:after:swap", () => {
    const values = JSON.parse(document.getElementById("script-values")?.textContent || "null");
    if (!values) return; // a line that is not finished yet
    requested = values;
    for (const name of filled) if (!(name in values)) set(name, start(name));
    for (const [name, value] of Object.entries(values)) set(name, value);
  });
})();
