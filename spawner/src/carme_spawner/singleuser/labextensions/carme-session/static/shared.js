/* What all of JupyterLab's extensions of a session need, once for all of them.
 *
 * Each of them is a container of webpack's module federation, written by hand so that it needs no build: JupyterLab
 * calls its `init` with the packages that it shares, and its `get` for the plugin. It imports this file, which the
 * browser loads once.
 */

/** The module that JupyterLab itself uses under a name. */
async function load(packages, name) {
  const versions = Object.values(packages[name] || {});
  const entry = versions.find(version => version.loaded) || versions[0];
  if (!entry) {
    throw new Error(`JupyterLab does not share ${name}.`);
  }
  return (await entry.get())();
}

/** The sentences of the session's extensions in JupyterLab's language, by the English ones. */
let sentences = {};

/** A sentence in JupyterLab's language; `{name}` in it becomes the value of that name. */
export function say(sentence, values = {}) {
  const found = sentences[sentence] || sentence;
  return found.replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
}

/** A plugin whose activation waits until JupyterLab's language is known. */
function translated(plugin, { ITranslator }) {
  const { activate, optional = [] } = plugin;
  return {
    ...plugin,
    optional: [...optional, ITranslator],
    activate: async (app, ...services) => {
      const translator = services.pop();
      if (translator?.languageCode?.startsWith('de')) {
        // Where the request is lost, they are English: what saves documents before the end counts more.
        ({ sentences } = await import('./german.js').catch(() => ({ sentences: {} })));
      }
      return activate(app, ...services);
    }
  };
}

/** What a container's `get` answers with.
 *
 * @param packages what JupyterLab shares, as it gave them to `init`
 * @param names the packages that the plugin needs
 * @param plugin makes the plugin of their modules, which come in the order of their names
 * @param speaks whether it shows sentences
 */
export async function extension(packages, names, plugin, speaks = true) {
  const built = plugin(...(await Promise.all(names.map(name => load(packages, name)))));
  const whole = speaks ? translated(built, await load(packages, '@jupyterlab/translation')) : built;
  return () => ({ __esModule: true, default: whole });
}

/** Ask the session's server; throws an Error with the sentence that it refused with, and its `status`. */
export async function ask(services, path, init) {
  const settings = services.ServerConnection.makeSettings();
  const url = settings.baseUrl.replace(/\/*$/, '/') + path;
  const response = await services.ServerConnection.makeRequest(url, { cache: 'no-store', ...init }, settings);
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) {
    const sentence = answer.message || answer.reason || say('The session did not answer. Try again in a minute.');
    throw Object.assign(new Error(sentence), { status: response.status });
  }
  return answer;
}

/** The path below which this session's server is. */
export function basePath() {
  const config = JSON.parse(document.getElementById('jupyter-config-data').textContent);
  return new URL(config.baseUrl, window.location.href).pathname;
}

/** The session's page on the portal, which every site and the sandbox have at the same origin. */
export function portalPage() {
  return `/sessions/${basePath().split('/').at(-2)}/`;
}

/** Do something again and again, and whenever somebody comes back to the page. The function that is returned ends that.
 *
 * A round does not wait for the one before, whose answer may never come.
 *
 * @param action what is done; it handles its own errors
 * @param milliseconds from one round to the next
 * @param wanted whether a round is done now; without it rounds are done in pages that nobody sees, too
 */
export function poll(action, milliseconds, wanted = () => true) {
  const round = () => wanted() && action();
  const comeBack = () => !document.hidden && round();
  const timer = setInterval(round, milliseconds);
  document.addEventListener('visibilitychange', comeBack);
  return () => {
    clearInterval(timer);
    document.removeEventListener('visibilitychange', comeBack);
  };
}
