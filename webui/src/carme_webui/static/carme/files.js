// Sends files in parts, so that an upload of gigabytes goes on where it was interrupted.
"use strict";

const form = document.getElementById("upload");
const rates = new Intl.NumberFormat(document.documentElement.lang, { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const TRIES = 8; // of one part, with longer and longer pauses

function bytesAsPath(name) {
  return encodeURIComponent(name);
}

// The same file for the same folder has the same name of its upload, in every browser.
async function uploadName(file) {
  const text = [form.dataset.folder, file.name, file.size, file.lastModified].join("\n");
  const hash = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(text));
  return [...new Uint8Array(hash).slice(0, 16)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

class Failed extends Error {}

async function ask(method, url, body) {
  const headers = { "X-CSRFToken": form.querySelector("[name=csrfmiddlewaretoken]").value };
  if (body) headers["Content-Type"] = "application/octet-stream";
  const answer = await fetch(url, { method, body, headers, redirect: "manual" });
  // The upload itself leads nowhere else: this is the login, which would be taken for an answer.
  if (answer.type === "opaqueredirect") throw new Failed(form.dataset.expired);
  const json = answer.headers.get("Content-Type")?.includes("json") ? await answer.json() : {};
  if (answer.ok) return json;
  // What the portal refuses stays refused; what did not reach it is tried again.
  if (json.message && answer.status < 500) throw new Failed(json.message);
  throw new Error(json.message ?? `${answer.status}`);
}

async function patiently(step) {
  for (let number = 1; ; number++) {
    try {
      return await step();
    } catch (error) {
      if (error instanceof Failed || number === TRIES) throw error;
      await new Promise((done) => setTimeout(done, 500 * 2 ** number));
    }
  }
}

function row(file) {
  const item = document.createElement("li");
  const name = document.createElement("span");
  name.textContent = file.name;
  const bar = document.createElement("progress");
  bar.max = file.size || 1;
  bar.value = 0;
  bar.setAttribute("aria-label", file.name);
  const words = document.createElement("span");
  words.className = "hint";
  item.append(name, " ", bar, " ", words);
  document.getElementById("uploads").append(item);
  return { item, bar, words };
}

async function send(file, shown) {
  const id = await uploadName(file);
  const url = `${form.dataset.url}?path=${form.dataset.folder}/${bytesAsPath(file.name)}&id=${id}`;
  let { offset, exists } = await patiently(() => ask("GET", url));
  if (exists && !confirm(`${file.name}\n\n${form.dataset.taken}`)) {
    shown.item.remove();
    return false;
  }
  if (offset > file.size) offset = 0;
  const part = Number(form.dataset.part);
  const began = performance.now();
  const from = offset;
  for (let done = false; !done; ) {
    shown.bar.value = offset;
    const end = Math.min(offset + part, file.size);
    const to = `${url}&offset=${offset}&size=${file.size}&replace=${exists ? 1 : 0}`;
    ({ offset, done } = await patiently(async () => {
      try {
        return await ask("PUT", to, file.slice(offset, end));
      } catch (error) {
        if (error instanceof Failed) throw error;
        // The answer may have been lost, not the part.
        const now = await ask("GET", url);
        if (now.offset === end && end < file.size) return { offset: end, done: false };
        if (now.exists && !exists && now.offset === 0 && end === file.size) return { offset: end, done: true };
        throw error;
      }
    }));
    const rate = (offset - from) / (performance.now() - began) * (1000 / 2 ** 20);
    shown.words.textContent = `${Math.round((100 * offset) / (file.size || 1))}\u00a0%, ${rates.format(rate)}\u00a0MiB/s`;
  }
  shown.bar.value = shown.bar.max;
  shown.words.textContent = form.dataset.done;
  return true;
}

async function sendAll(files) {
  let sent = 0;
  for (const file of files) {
    const shown = row(file);
    try {
      sent += (await send(file, shown)) ? 1 : 0;
    } catch (error) {
      shown.words.textContent = `${form.dataset.failed}: ${error.message} `;
      const again = document.createElement("button");
      again.type = "button";
      again.textContent = form.dataset.again;
      again.addEventListener("click", () => {
        shown.item.remove();
        sendAll([file]);
      });
      shown.item.append(again);
    }
  }
  // With all of them there, the list shows them.
  if (sent && sent === files.length) location.reload();
}

if (form) {
  const input = document.getElementById("upload-files");
  input.addEventListener("change", () => sendAll([...input.files]));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("dragover", (event) => event.preventDefault());
  form.addEventListener("drop", (event) => {
    event.preventDefault();
    sendAll([...event.dataTransfer.files]);
  });
}
