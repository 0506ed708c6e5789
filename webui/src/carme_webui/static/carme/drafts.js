// What somebody writes for long (a script, a definition, an announcement) outlives a login that has expired meanwhile:
// the portal asks for the login when the form, or a part of its page, is requested, and then shows the page again, where
// the form is filled in as it was. Until then this tab keeps it; the next page of the portal drops it.
"use strict";

(() => {
  const KEY = "carme-draft";
  const user = document.getElementById("main").dataset.user;
  const address = location.pathname + location.search;
  const form = document.querySelector("main form[method=post]:has(textarea)");

  const chosen = field => field.type === "checkbox" || field.type === "radio";

  function fill(fields) {
    const shown = new Map(fields);
    for (const field of form.elements) {
      const value = shown.get(field.name);
      if (chosen(field)) {
        field.checked = fields.some(([name, given]) => name === field.name && given === field.value);
      } else if (value !== undefined && value !== field.value) {
        field.value = value;
        field.closest("details")?.setAttribute("open", "");
      }
    }
  }

  /** What the form shows: a page's script may send something else. */
  function keep() {
    const fields = [];
    for (const field of form.elements) {
      if (!field.name || ["password", "file", "submit"].includes(field.type)) continue;
      // Other hidden fields are the page's own, such as the form's token.
      if (field.type === "hidden" && field.name !== "own_fields") continue;
      if (!chosen(field) || field.checked) fields.push([field.name, field.value]);
    }
    try {
      sessionStorage.setItem(KEY, JSON.stringify({ user, address, fields }));
    } catch {
      // The browser has no room for it.
    }
  }

  const saved = JSON.parse(sessionStorage.getItem(KEY) ?? "null");
  if (user && saved) {
    const here = saved.address === address && saved.user === user;
    // The answer to the form itself, such as its errors, shows what the server made of it.
    const answer = document.referrer === location.origin + address;
    if (here && form && !answer) {
      fill(saved.fields);
      form.dataset.draft = "filled"; // script.js takes `own_fields` then for all that is the user's own
    }
    if (!here || form) sessionStorage.removeItem(KEY);
  }
  // A part of the page that finds the login expired has the page loaded again before anything is sent.
  for (const event of ["change", "submit"]) form?.addEventListener(event, keep);
  // Who signs out may leave the browser to somebody else.
  document.querySelector("form.who")?.addEventListener("submit", () => sessionStorage.removeItem(KEY));
})();
